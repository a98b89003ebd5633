"""Predicted seconds of a placement: ggml runs the splits of a graph one after another (DESIGN 2.13), so a forward pass
takes the sum of its operators where they are, of what is no operator in each layer, and of the crossings. Operators
that are split between both sides run block by block in a backend whose inputs and outputs are in host memory: for the
crossings they are the host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oallama.core.types import CPU_DEVICE, Predicted, Profile, Workload
from oallama.cost.graph import Graph, crossings
from oallama.cost.operator_cost import Curve, OperatorCost, Pass, interpolate
from oallama.cost.split_ffn import SplitCosts, split_seconds
from oallama.cost.transfer import TransferRates

RestIndex = Mapping[str, Mapping[int, Curve]]
"""device -> n_kv -> ((n_tokens, seconds per layer), ...)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a search needs to price a placement over a fixed list of forward passes."""

    operators: tuple[OperatorCost, ...]
    graph: Graph
    rates: TransferRates
    passes: tuple[Pass, ...]
    rest_cpu_s: float  # of one layer over `passes`, without weight-bearing mul-mats
    rest_device_s: float
    split: SplitCosts | None = None  # None: nothing can be split


def index_rest(profile: Profile) -> RestIndex:
    index: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for case in profile.rest:
        index.setdefault(case.device, {}).setdefault(case.n_kv, []).append((case.n_tokens, case.seconds))
    return {device: {n_kv: tuple(sorted(c)) for n_kv, c in by_kv.items()} for device, by_kv in index.items()}


def rest_seconds(index: RestIndex, device: str, passes: Sequence[Pass]) -> float:
    """Seconds of one layer's other nodes over `passes`; linear in n_tokens and in KV depth between what was measured.
    Zero where the profile has none."""
    by_kv = index.get(device)
    if not by_kv:
        return 0.0
    total = 0.0
    for p in passes:
        by_depth = tuple(sorted((n_kv, interpolate(curve, p.n_tokens)) for n_kv, curve in by_kv.items()))
        total += p.count * interpolate_depth(by_depth, p.n_kv)
    return total


def interpolate_depth(points: Curve, n_kv: int) -> float:
    """Linear in KV depth through the measured depths, extrapolated with the outer slopes (attention is affine in
    depth); below the first depth never less than in proportion to depth."""
    if len(points) == 1:
        return points[0][1]
    below = [i for i in range(len(points) - 1) if points[i][0] <= n_kv]
    i = below[-1] if below else 0
    (n0, s0), (n1, s1) = points[i], points[i + 1]
    linear = s0 + (s1 - s0) * (n_kv - n0) / (n1 - n0)
    return max(linear, points[0][1] * n_kv / points[0][0]) if n_kv < points[0][0] else linear


def placement_seconds(
    costs: Costs, on_device: Sequence[bool], first_device_layer: int, gg: Sequence[int] = ()
) -> float:
    """Predicted seconds of all passes together under a placement.

    on_device: one entry per operator, in the order of costs.operators. first_device_layer as in graph.node_sides.
    gg: elements of each operator's slice on the device, 0 where it is whole; empty: nothing is split.
    """
    total = 0.0
    for index, (cost, device) in enumerate(zip(costs.operators, on_device, strict=True)):
        if gg and gg[index]:
            continue
        if device and cost.t_gpu_s is None:
            return float("inf")
        total += cost.t_gpu_s if device and cost.t_gpu_s is not None else cost.t_cpu_s
    if any(gg):
        if costs.split is None:
            raise ValueError("these costs cannot price split operators")
        total += split_seconds(costs.split, gg)
    n_layer = costs.graph.n_layer
    n_device_layers = max(0, n_layer - first_device_layer)
    total += n_device_layers * costs.rest_device_s + (n_layer - n_device_layers) * costs.rest_cpu_s
    return total + costs.rates.over(crossings(costs.graph, on_device, first_device_layer), costs.passes)


def predicted(
    prefill: Costs,
    decode: Costs,
    on_device: Sequence[bool],
    first_device_layer: int,
    workload: Workload,
    gg: Sequence[int] = (),
) -> Predicted:
    """TTFT, TPOT and their sum over the workload. `decode` is priced over one token."""
    ttft_s = placement_seconds(prefill, on_device, first_device_layer, gg)
    tpot_s = placement_seconds(decode, on_device, first_device_layer, gg)
    return Predicted(ttft_s, tpot_s, ttft_s + workload.n_gen * tpot_s)


def rest_of(index: RestIndex, device: str, passes: Sequence[Pass]) -> tuple[float, float]:
    """(CPU, device) seconds of one layer's other nodes; the device's fall back to the CPU's where it was not timed."""
    on_cpu = rest_seconds(index, CPU_DEVICE, passes)
    return on_cpu, (rest_seconds(index, device, passes) if device in index else on_cpu)
