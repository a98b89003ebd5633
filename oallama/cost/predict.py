"""Predicted seconds of a placement: ggml runs the splits of a graph one after another (DESIGN 2.13), so a forward pass
takes the sum of its operators where they are, of what is no operator in each layer, and of the crossings. Operators
that are split between both sides run block by block in a backend whose inputs and outputs are in host memory: for the
crossings they are the host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from oallama.core.types import CPU_DEVICE, Predicted, Profile, Workload
from oallama.cost.graph import Graph, crossings
from oallama.cost.operator_cost import OFFLOAD_MIN_TOKENS, Curve, OperatorCost, Pass, interpolate
from oallama.cost.split_ffn import SplitCosts, split_seconds
from oallama.cost.transfer import TransferRates

KV_STEP = 256
"""llama.cpp's attention sees the KV cache in steps of so many positions."""


@dataclass(frozen=True, slots=True)
class RestCurves:
    """What a layer takes beside its operators on one device."""

    by_tokens: Mapping[int, Curve]  # n_tokens -> ((positions in the KV cache, seconds per layer), ...)
    stepped: bool  # the time is that of whole steps of KV_STEP, masked or not

    def seconds(self, n_tokens: int, n_kv: int) -> float:
        """Linear in n_tokens and in depth between what was measured."""
        depth = in_steps(n_kv) if self.stepped else n_kv
        return interpolate(
            tuple((n, interpolate_depth(points, depth)) for n, points in sorted(self.by_tokens.items())), n_tokens
        )


RestIndex = Mapping[str, RestCurves]
"""By device."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a search needs to price a placement over a fixed list of forward passes."""

    operators: tuple[OperatorCost, ...]
    graph: Graph
    rates: TransferRates
    passes: tuple[Pass, ...]
    rest_cpu_s: float  # of one layer on the host over `passes`, without weight-bearing mul-mats
    rest_device_s: float
    split: SplitCosts | None = None  # None: nothing can be split
    offloaded: tuple[bool, ...] = ()  # for each operator, whether llama.cpp computes it on the device in large batches
    # though the host has it; (): none
    transfers: dict[tuple[object, ...], float] = field(init=False, default_factory=dict, compare=False, repr=False)
    """T' that was asked for (place/affinity.py): a search asks for the same few again and again."""


def index_rest(profile: Profile) -> RestIndex:
    """With flash attention on each device that has it, else without; attention.with_attention leaves one of them.

    Flash attention takes time for what a token sees, without it attention goes through all that it is shown.
    """
    index = {}
    for device in {case.device for case in profile.rest}:
        cases = [case for case in profile.rest if case.device == device]
        plain = [case for case in cases if case.shape is not None and not case.shape.flash_attn]
        stepped = len(plain) == len(cases)
        by_tokens: dict[int, dict[int, float]] = {}
        for case in plain if stepped else [case for case in cases if case not in plain]:
            depth = in_steps(case.n_kv) if stepped else case.n_kv
            by_tokens.setdefault(case.n_tokens, {})[depth] = case.seconds
        index[device] = RestCurves({n: tuple(sorted(points.items())) for n, points in by_tokens.items()}, stepped)
    return index


def in_steps(n_kv: int) -> int:
    """Positions of the KV cache that attention is shown."""
    return -(-n_kv // KV_STEP) * KV_STEP


def rest_seconds(index: RestIndex, device: str, passes: Sequence[Pass]) -> float:
    """Seconds of one layer's other nodes over `passes`. Zero where the profile has none."""
    curves = index.get(device)
    return sum(p.count * curves.seconds(p.n_tokens, p.n_kv) for p in passes) if curves else 0.0


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
    if any(gg) and costs.offloaded:  # slices are the split backend's, which nobody offloads
        costs = replace(costs, offloaded=tuple(o and not cut for o, cut in zip(costs.offloaded, gg, strict=True)))
    return total + transfer_seconds(costs, on_device, first_device_layer)


def transfer_seconds(
    costs: Costs, on_device: Sequence[bool], first_device_layer: int, window: tuple[int, int] | None = None
) -> float:
    """Of crossings over all passes, between the layers of the window (None: all). What is offloaded in a large batch
    is on the device there, and takes norms and attention along."""
    large = tuple(p for p in costs.passes if any(costs.offloaded) and p.n_tokens >= OFFLOAD_MIN_TOKENS)
    if not large:
        return costs.rates.over(crossings(costs.graph, on_device, first_device_layer, window), costs.passes)
    small = tuple(p for p in costs.passes if p.n_tokens < OFFLOAD_MIN_TOKENS)
    there = [on or off for on, off in zip(on_device, costs.offloaded, strict=True)]
    seconds = costs.rates.over(crossings(costs.graph, there, 0, window), large)
    if small:
        seconds += costs.rates.over(crossings(costs.graph, on_device, first_device_layer, window), small)
    return seconds


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
