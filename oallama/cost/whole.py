"""Predicted seconds of a placement of whole operators.

ggml runs the splits of a graph one after another, so a forward pass takes the sum of its operators where they are, of
what is no operator in each layer, and of the device copies. Sliced blocks are priced in cost/slices.py. For the device
copies they are where their inputs and outputs are: in host memory, or on the device with their neighbours
(cost/blocks.py, `residents`).

llama.cpp computes a large batch of a layer that it keeps on the host on the device: it streams plain weights there one
by one. The nodes between mul-mats have no weights, and ggml's scheduler gives those to the device of their neighbours:
norms, attention and the rest run there too. Only the KV write stays, because the layer's cache is in host memory: new
keys and values come back, and attention has the whole cache copied to the device, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import inf
from operator import getitem, or_

from oallama.core.ggml_types import bytes_per_element
from oallama.core.profile import LinearFit, NonMatmulShape, Profile
from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, MulMat, Operator
from oallama.cost.graph import Graph, computes_outputs_only, device_copies
from oallama.cost.kernels import Kernel, Kernels, NonMatmulIndex, interpolate, non_matmul_of, non_matmul_seconds
from oallama.cost.passes import Pass
from oallama.cost.rates import TransferRates, transfer_rates, weight_stream

OFFLOAD_MIN_TOKENS = 32
"""From this batch size on llama.cpp streams a host weight to the device and computes there."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """An operator's seconds over a phase on either side; `t_gpu_s` is None if the device cannot compute it."""

    bytes: int
    t_cpu_s: float  # T_c, in the fastest layout
    t_gpu_s: float | None  # T_g
    layout: str  # CPU layout that gave t_cpu_s
    streamed_s: float = 0.0  # of t_cpu_s: the weight is copied to the device, which computes for the rest of that pass


def operator_cost(
    kernels: Kernels,
    operator: Operator,
    over: Sequence[Pass],
    stream: LinearFit | None = None,
    layout: str | None = None,
) -> OperatorCost:
    """T_c in this CPU layout, or None: in the one that is fastest over `over`; and T_g.

    stream: the link over which llama.cpp streams plain host weights to this device for large batches, one after another
    with the computation, of experts those that are used; None if the device does not take them. Repacked weights are
    never streamed.
    Raises ProfileError if the CPU never measured this operator's shape.
    """
    gpu = kernels.on_device(operator)
    timed = []
    for at, cpu in kernels.on_host(operator).items():
        if layout not in (None, at):
            continue
        takes = stream is not None and gpu is not None and at == PLAIN_LAYOUT
        streamed = [p for p in over if takes and p.n_tokens >= OFFLOAD_MIN_TOKENS]
        seconds = _seconds(cpu, [p for p in over if p not in streamed])
        copied_s = 0.0
        if stream is not None and gpu is not None and streamed:
            routed = operator.mul_mat.share_routed
            copied_s = sum(p.count * stream.seconds(operator.bytes * routed(p.n_tokens)) for p in streamed)
            seconds += copied_s + _seconds(gpu, streamed)
        timed.append((seconds, at, copied_s))
    t_cpu_s, found, copied_s = min(timed)
    return OperatorCost(operator.bytes, t_cpu_s, _seconds(gpu, over) if gpu else None, found, copied_s)


def _seconds(kernel: Kernel, over: Iterable[Pass]) -> float:
    return sum(p.count * interpolate(kernel.whole, p.n_tokens) for p in over)


def operator_costs(
    kernels: Kernels,
    operators: Sequence[Operator],
    n_run: int,
    over: Sequence[Pass],
    stream: LinearFit | None = None,
    layouts: Sequence[str] | None = None,
) -> tuple[OperatorCost, ...]:
    """operator_cost of each operator, equal ones computed once; those behind the last layer's attention over the tokens
    whose logits are wanted, and the output also over the drafts of the model's own last block. layouts: of each; None:
    the fastest."""
    output_passes = [replace(p, n_tokens=p.n_outputs) for p in over if p.n_outputs]
    drafting = [
        replace(p, n_tokens=p.n_tokens // (p.n_drafts + 1), count=p.count * p.n_drafts) for p in over if p.n_drafts
    ]
    seen: dict[tuple[MulMat, bool, bool, str | None], OperatorCost] = {}
    costs = []
    for i, operator in enumerate(operators):
        outputs_only = computes_outputs_only(operator, n_run)
        layout = layouts[i] if layouts else None
        key = (operator.mul_mat, outputs_only, operator.is_last, layout)
        if key not in seen:
            computed = [*(output_passes if outputs_only else over), *(drafting if operator.is_last else ())]
            seen[key] = operator_cost(kernels, operator, computed, stream, layout)
        costs.append(seen[key])
    return tuple(costs)


KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True)
class HostCache:
    """The KV cache of one layer in host memory, and the link that attention on the device reaches it over."""

    upload: LinearFit
    download: LinearFit
    bytes_per_position: float

    def seconds(self, n_tokens: int, n_kv: int) -> float:
        """Seconds of copies of one layer in one pass: the cache to the device, new positions back."""
        to_device = KEYS_AND_VALUES * self.upload.alpha_s + n_kv * self.bytes_per_position * self.upload.beta_s_per_byte
        back = KEYS_AND_VALUES * self.download.alpha_s
        return to_device + back + n_tokens * self.bytes_per_position * self.download.beta_s_per_byte


def host_cache(profile: Profile) -> HostCache | None:
    """The KV cache on the host as the device reads it; None if the device takes no work from the host, or the profile
    does not say how large the cache is."""
    stream = weight_stream(profile)
    if stream is None or not profile.rest:
        return None
    return HostCache(stream, transfer_rates(profile).copy_out, cache_bytes(profile.rest[0].shape))


def cache_bytes(shape: NonMatmulShape) -> float:
    """Bytes of one position of the KV cache in one layer."""
    keys = shape.n_embd_head_k * bytes_per_element(shape.type_k)
    values = shape.n_embd_head_v * bytes_per_element(shape.type_v)
    return shape.n_head_kv * (keys + values)


def takes_attention(operators: Sequence[Operator], costs: Sequence[OperatorCost]) -> bool:
    """Whether the mul-mats around attention are offloaded, and so take it along: where the host keeps them plain."""
    around = [c for o, c in zip(operators, costs, strict=True) if o.role.startswith("attn_")]
    return bool(around) and all(c.layout == PLAIN_LAYOUT and c.t_gpu_s is not None for c in around)


def offloaded(operators: Sequence[Operator], costs: Sequence[OperatorCost], n_run: int) -> tuple[bool, ...]:
    """Which operators llama.cpp computes on the device in a large batch though the host has them. What sees only the
    tokens whose logits are wanted never has a large batch."""
    return tuple(
        c.layout == PLAIN_LAYOUT and c.t_gpu_s is not None and not computes_outputs_only(o, n_run)
        for o, c in zip(operators, costs, strict=True)
    )


def non_matmul_with_offload(
    index: NonMatmulIndex, device: str, passes: Sequence[Pass], cache: HostCache | None
) -> tuple[float, float]:
    """(host's, device's) seconds of one layer's other nodes; cache: None if nothing is offloaded."""
    on_cpu, on_device = non_matmul_of(index, device, passes)
    if cache is None or device not in index:
        return on_cpu, on_device
    large = [p for p in passes if p.n_tokens >= OFFLOAD_MIN_TOKENS]
    small = [p for p in passes if p.n_tokens < OFFLOAD_MIN_TOKENS]
    copies = sum(p.count * cache.seconds(p.n_tokens, p.n_kv) for p in large)
    return non_matmul_seconds(index, CPU_DEVICE, small) + non_matmul_seconds(index, device, large) + copies, on_device


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices of operators and device copies over a fixed list of forward passes."""

    operators: tuple[OperatorCost, ...]
    graph: Graph
    rates: TransferRates
    passes: tuple[Pass, ...]
    non_matmul_cpu_s: float  # of one layer on the host over `passes`, without weight-bearing mul-mats
    non_matmul_device_s: float
    offloaded: tuple[bool, ...] = ()  # for each operator, whether llama.cpp computes it on the device in large batches
    # though the host has it; (): none
    to_first: TransferRates | None = None  # of several devices that is the first, and this one is behind it: rates of
    # copies between the two
    sides_s: tuple[tuple[float, float], ...] = field(init=False, compare=False, repr=False)  # (T_c, T_g or infinite)
    large: tuple[Pass, ...] = field(init=False, compare=False, repr=False)  # passes, for which it does
    small: tuple[Pass, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sides = ((cost.t_cpu_s, inf if cost.t_gpu_s is None else cost.t_gpu_s) for cost in self.operators)
        object.__setattr__(self, "sides_s", tuple(sides))
        large = tuple(p for p in self.passes if p.n_tokens >= OFFLOAD_MIN_TOKENS)
        object.__setattr__(self, "large", large)
        object.__setattr__(self, "small", tuple(p for p in self.passes if p not in large))

    def non_matmul_seconds(self, first_device_layer: int) -> float:
        """Seconds of the non-matmul work of all layers that run. Layers from first_device_layer on are on the
        device."""
        n_layers = self.graph.n_computed
        n_device_layers = max(0, n_layers - first_device_layer)
        return n_device_layers * self.non_matmul_device_s + (n_layers - n_device_layers) * self.non_matmul_cpu_s

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layout in which the host holds each operator."""
        return tuple(cost.layout for cost in self.operators)


def placement_seconds(
    costs: Costs, on_device: Sequence[bool], first_device_layer: int, sliced: Collection[int] = ()
) -> float:
    """Predicted total seconds of all passes under a placement.

    on_device: one entry per operator, in the order of costs.operators. first_device_layer as in graph.device_copies.
    sliced: operators that take no time here, as their blocks are priced elsewhere.
    """
    seconds: Iterable[float] = map(getitem, costs.sides_s, on_device)
    if sliced:
        seconds = compress(seconds, [i not in sliced for i in range(len(on_device))])
    total = sum(seconds)
    if total == inf:
        return inf
    total += costs.non_matmul_seconds(first_device_layer)
    return total + transfer_seconds(costs, on_device, first_device_layer, sliced=sliced)


def transfer_seconds(
    costs: Costs,
    on_device: Sequence[bool],
    first_device_layer: int,
    window: tuple[int, int] | None = None,
    sliced: Collection[int] = (),
) -> float:
    """Seconds of device copies over all passes, between the layers of the window (None: all). What is offloaded in a
    large batch is on the device there, and takes norms and attention along; slices are the split back end's, which
    nobody offloads. What another device computes is not on this one, but crosses to that one and back."""
    if costs.to_first is not None:
        moved = device_copies(costs.graph, on_device, first_device_layer, window)
        first, last = (0, len(on_device)) if window is None else costs.graph.operators_of(window)
        crosses = any(costs.offloaded[i] and not on_device[i] and i not in sliced for i in range(first, last))
        large = (costs.to_first if crosses else costs.rates).over(moved, costs.large)
        return large + costs.rates.over(moved, costs.small)
    offloaded: Sequence[bool] = costs.offloaded if costs.large else ()
    if sliced:
        offloaded = [off and i not in sliced for i, off in enumerate(offloaded)]
    if not any(offloaded):
        return costs.rates.over(device_copies(costs.graph, on_device, first_device_layer, window), costs.passes)
    first, last = (0, len(offloaded)) if window is None else costs.graph.operators_of(window)
    sides = list(on_device)
    sides[first:last] = map(or_, on_device[first:last], offloaded[first:last])
    seconds = costs.rates.over(device_copies(costs.graph, sides, 0, window), costs.large)
    if costs.small:
        seconds += costs.rates.over(device_copies(costs.graph, on_device, first_device_layer, window), costs.small)
    return seconds


def cpu_seconds(costs: Costs, on_device: Sequence[bool], first_device_layer: int, sliced: Collection[int]) -> float:
    """The CPU's part of placement_seconds."""
    n_layers = min(costs.graph.n_computed, first_device_layer)
    seconds = (
        cost.t_cpu_s
        for i, (cost, is_device) in enumerate(zip(costs.operators, on_device, strict=True))
        if not is_device and i not in sliced
    )
    return sum(seconds) + n_layers * costs.non_matmul_cpu_s
