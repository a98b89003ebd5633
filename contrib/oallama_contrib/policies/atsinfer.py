"""The `atsinfer` policy, to compare with: ATSInfer's placement of single tensors (arXiv 2607.10183), by dynamic
programming over a chain of operators with a switching cost.

Operators run one after another. Each takes its time where it is; where one runs on another side than the one before,
what it reads is copied and the sides wait for each other. The least sum under a limit of memory is a knapsack whose
state also has the side of the last operator. Attention and norms are where their layer is, whatever lies beside them:
the chain does not know of them. Coordination of both sides at run time and planning anew while it runs are not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, inf

from oallama.cost.graph import DeviceCopies
from oallama.cost.whole import Costs
from oallama.planner.placement import Placement, all_on_cpu, placed_whole
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import Problem

MOST_UNITS = 1 << 14
"""Number of units of memory. Bytes are rounded up to whole units, so that a budget is never exceeded."""


@dataclass(frozen=True, slots=True)
class Link:
    """One operator of the chain; seconds over the passes of a phase."""

    bytes: int
    cpu_s: float
    gpu_s: float | None  # None: it cannot be on the device
    enter_s: float  # before it, where it is on the device and the one before it is not
    leave_s: float  # before it, where it is on the host and the one before it is not


@policy(
    "atsinfer", "operators by dynamic programming over a chain",
    keeps_ubatch=True,
    caveat="only ATSInfer's placement: there is no planning while it runs",
)  # fmt: skip
def atsinfer(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    """The least sum of the chain: norms and KV of all layers on the device, or of as many as fit."""
    costs, n_layer = inputs.costs, inputs.costs.graph.n_layer
    fitting = (first for first in range(n_layer + 1) if inputs.operator_bytes(first) >= 0)
    first_device_layer = next(fitting, n_layer + 1)
    on_device = least_chain(*chain(costs, first_device_layer), max(0, inputs.operator_bytes(first_device_layer)))
    yield placed_whole(costs, on_device, first_device_layer) if any(on_device) else all_on_cpu(costs)


def chain(costs: Costs, first_device_layer: int) -> tuple[list[Link], float]:
    """The operators in graph order, and the seconds that the last one's result takes from the device to the host.
    Those of layers whose norms and KV are on the host stay there."""
    graph = costs.graph
    links: list[Link] = []
    leave_s = 0.0
    operator_nodes = (
        (number, node) for number, layer in enumerate(graph.layers) for node in layer.nodes if node.operator is not None
    )
    for index, (number, node) in enumerate(operator_nodes):
        inputs = [read for source in node.inputs if (read := graph.layers[number].node(source)) is not None]
        per_token = sum(node_read.bytes_per_token for node_read in inputs if not node_read.outputs_only)
        per_output = sum(node_read.bytes_per_token for node_read in inputs if node_read.outputs_only)
        enter_s = costs.rates.seconds_over(
            DeviceCopies(1, 1, len(inputs), 0, per_token, 0, per_output, 0), costs.passes
        )
        cost = costs.operators[index]
        is_device = number >= first_device_layer
        links.append(Link(cost.bytes, cost.t_cpu_s, cost.t_gpu_s if is_device else None, enter_s, leave_s))
        by_token, by_output = (0, node.bytes_per_token) if node.outputs_only else (node.bytes_per_token, 0)
        leave_s = costs.rates.seconds_over(DeviceCopies(1, 0, 0, 1, 0, by_token, 0, by_output), costs.passes)
    return links, leave_s


def least_chain(links: Sequence[Link], back_s: float, budget: int) -> tuple[bool, ...]:
    """Which links are on the device where the chain takes the least seconds with no more than `budget` bytes there. It
    begins and ends on the host; back_s: from a last link on the device.

    Exact where the greatest common divisor of all sizes gives no more than MOST_UNITS units, else for sizes rounded up.
    """
    import numpy as np

    most_bytes = min(budget, sum(link.bytes for link in links))
    common = max(1, gcd(*(link.bytes for link in links)))
    unit = common * max(1, -(-most_bytes // (common * MOST_UNITS)))
    n_units = most_bytes // unit + 1
    host, device = np.zeros(n_units), np.full(n_units, inf)  # least seconds by memory and the last link's side
    stayed = []  # for each link: of (host, device), where the one before it is on the same side
    for link in links:
        from_host, from_device = host, device + link.leave_s
        host_stays = from_host <= from_device
        next_host = np.where(host_stays, from_host, from_device) + link.cpu_s
        next_device, device_stays = np.full(n_units, inf), np.zeros(n_units, dtype=bool)
        size = -(-link.bytes // unit)
        if link.gpu_s is not None and size < n_units:
            n_left = n_units - size
            stay, enter = device[:n_left], host[:n_left] + link.enter_s
            device_stays[size:] = stay <= enter
            next_device[size:] = np.minimum(stay, enter) + link.gpu_s
        host, device = next_host, next_device
        stayed.append((host_stays, device_stays))
    units, is_device = n_units - 1, bool(device[-1] + back_s < host[-1])
    on_device: list[bool] = []
    for link, (host_stays, device_stays) in zip(reversed(links), reversed(stayed), strict=True):
        on_device.append(is_device)
        same_side = bool((device_stays if is_device else host_stays)[units])
        units -= -(-link.bytes // unit) if is_device else 0
        is_device = is_device if same_side else not is_device
    return tuple(reversed(on_device))
