"""Predicted seconds of a placement of whole operators.

ggml runs the splits of a graph one after another, so the seconds of a forward pass are a sum: operators where they are
placed, each layer's non-matmul work, and device copies. Sliced blocks are priced in cost/slices.py; for device copies
they count as where their inputs and outputs are: in host memory, or on the device with their neighbours
(cost/blocks.py, `residents`).

Offload: llama.cpp computes large batches of a host layer on the device, to which it streams plain weights one by one.
ggml's scheduler then gives the nodes between mul-mats (norms, attention and others) to the device of their neighbours.
Only the KV write stays on the host, where the layer's cache is: in every micro-batch new keys and values are copied
back, and the whole cache is copied to the device for attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from math import inf
from operator import getitem, or_

from oallama.core.profile import LinearFit, Profile
from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, MulMat, Operator
from oallama.cost.blocks import experts_bytes
from oallama.cost.graph import Graph, computes_outputs_only, device_copies
from oallama.cost.kernels import Kernel, Kernels, NonMatmulIndex, interpolate, non_matmul_of, non_matmul_seconds
from oallama.cost.passes import Pass
from oallama.cost.rates import TransferRates, transfer_rates, weight_stream

OFFLOAD_MIN_TOKENS = 32
"""Smallest batch for which llama.cpp streams a host weight to the device and computes there."""


def by_offload(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """(passes large enough that llama.cpp offloads host weights to the device, the other passes)."""
    large = tuple(p for p in passes if p.n_tokens >= OFFLOAD_MIN_TOKENS)
    return large, tuple(p for p in passes if p.n_tokens < OFFLOAD_MIN_TOKENS)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """An operator's seconds over a phase on either side; `t_gpu_s` is None if the device cannot compute it."""

    bytes: int
    t_cpu_s: float  # T_c, with the weight in host memory
    t_gpu_s: float | None  # T_g
    layout: str  # CPU layout of t_cpu_s
    streamed_s: float = 0.0  # the part of t_cpu_s in which llama.cpp copies the weight to the device (offload)


def operator_cost(
    kernels: Kernels,
    operator: Operator,
    passes: Sequence[Pass],
    stream: LinearFit | None = None,
    layout: str | None = None,
) -> OperatorCost:
    """T_c and T_g over these passes; of experts with what follows (experts_bytes). layout: the CPU layout of T_c;
    None: the fastest.

    stream: the link over which llama.cpp offloads plain host weights to the device in large batches (used experts only;
    copies and computing alternate); None if the device takes none. Repacked weights are never offloaded.
    Raises ProfileError if this operator's shape was not measured on the CPU.
    """
    gpu, (on_cpu_s, on_device_s) = kernels.on_device(operator), kernels.after_experts_s(operator)
    timed = []
    for host_layout, cpu in kernels.on_host(operator).items():
        if layout not in (None, host_layout):
            continue
        takes = stream is not None and gpu is not None and host_layout == PLAIN_LAYOUT
        streamed, others = by_offload(passes) if takes else ((), passes)
        seconds = _seconds(cpu, on_cpu_s, others)
        copied_s = 0.0
        if stream is not None and gpu is not None and streamed:
            routed = operator.mul_mat.share_routed
            copied_s = sum(p.count * stream.seconds(operator.bytes * routed(p.n_tokens)) for p in streamed)
            seconds += copied_s + _seconds(gpu, on_device_s, streamed)
        timed.append((seconds, host_layout, copied_s))
    t_cpu_s, fastest_layout, copied_s = min(timed)
    t_gpu_s = _seconds(gpu, on_device_s, passes) if gpu else None
    return OperatorCost(operator.bytes, t_cpu_s, t_gpu_s, fastest_layout, copied_s)


def _seconds(kernel: Kernel, after_s: float, passes: Iterable[Pass]) -> float:
    return sum(p.count * (interpolate(kernel.whole, p.n_tokens) + p.n_tokens * after_s) for p in passes)


def operator_costs(
    kernels: Kernels,
    operators: Sequence[Operator],
    n_run: int,
    passes: Sequence[Pass],
    stream: LinearFit | None = None,
    layouts: Sequence[str] | None = None,
) -> tuple[OperatorCost, ...]:
    """operator_cost of each operator; equal ones are computed once. Operators after the last layer's attention only
    compute tokens whose logits are wanted; the output also computes the drafts of the model's MTP layer. layouts: of
    each operator; None: the fastest."""
    output_passes = [replace(p, n_tokens=p.n_outputs) for p in passes if p.n_outputs]
    drafting = [
        replace(p, n_tokens=p.n_tokens // (p.n_drafts + 1), count=p.count * p.n_drafts) for p in passes if p.n_drafts
    ]
    seen: dict[tuple[MulMat, int, bool, bool, str | None], OperatorCost] = {}
    costs = []
    for i, operator in enumerate(operators):
        outputs_only = computes_outputs_only(operator, n_run)
        layout = layouts[i] if layouts else None
        key = (operator.mul_mat, experts_bytes(operator), outputs_only, operator.is_last, layout)
        if key not in seen:
            computed = [*(output_passes if outputs_only else passes), *(drafting if operator.is_last else ())]
            seen[key] = operator_cost(kernels, operator, computed, stream, layout)
        costs.append(seen[key])
    return tuple(costs)


KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True)
class HostCache:
    """The KV cache of one layer in host memory, and the link over which attention on the device reads it."""

    upload: LinearFit
    download: LinearFit
    bytes_per_position: float

    def seconds(self, n_tokens: int, n_kv: int) -> float:
        """Seconds of copies for one layer in one pass: the cache to the device, new positions back."""
        to_device = KEYS_AND_VALUES * self.upload.alpha_s + n_kv * self.bytes_per_position * self.upload.beta_s_per_byte
        back = KEYS_AND_VALUES * self.download.alpha_s
        return to_device + back + n_tokens * self.bytes_per_position * self.download.beta_s_per_byte


def host_cache(profile: Profile) -> HostCache | None:
    """The KV cache on the host as the device reads it; None if llama.cpp does not offload to the device, or the profile
    has no attention, whose shape gives the cache's size."""
    stream = weight_stream(profile)
    if stream is None or not profile.rest:
        return None
    return HostCache(stream, transfer_rates(profile).copy_out, sum(profile.rest[0].shape.cache_bytes()))


def is_around_attention(operator: Operator) -> bool:
    """Whether this is one of the weights of attention."""
    return operator.role.startswith("attn_")


def offloads_attention(operators: Sequence[Operator], costs: Sequence[OperatorCost]) -> bool:
    """Whether attention of host layers is offloaded: if all mul-mats around it are, as the host keeps them plain."""
    attention_costs = [c for o, c in zip(operators, costs, strict=True) if is_around_attention(o)]
    return bool(attention_costs) and all(c.layout == PLAIN_LAYOUT and c.t_gpu_s is not None for c in attention_costs)


def offloaded(operators: Sequence[Operator], costs: Sequence[OperatorCost], n_run: int) -> tuple[bool, ...]:
    """Which host operators llama.cpp offloads in large batches. Operators that only compute tokens whose logits are
    wanted never have a large batch."""
    return tuple(
        c.layout == PLAIN_LAYOUT and c.t_gpu_s is not None and not computes_outputs_only(o, n_run)
        for o, c in zip(operators, costs, strict=True)
    )


def non_matmul_with_offload(
    index: NonMatmulIndex, device: str, passes: Sequence[Pass], cache: HostCache | None
) -> tuple[float, float]:
    """(seconds on the host, on the device) of one layer's non-matmul work. cache: None if nothing is offloaded."""
    on_cpu, on_device = non_matmul_of(index, device, passes)
    if cache is None or device not in index:
        return on_cpu, on_device
    large, small = by_offload(passes)
    copies = sum(p.count * cache.seconds(p.n_tokens, p.n_kv) for p in large)
    return non_matmul_seconds(index, CPU_DEVICE, small) + non_matmul_seconds(index, device, large) + copies, on_device


@dataclass(frozen=True)
class Costs:
    """Prices of operators, non-matmul work and device copies over a fixed list of forward passes."""

    operators: tuple[OperatorCost, ...]
    graph: Graph
    rates: TransferRates
    passes: tuple[Pass, ...]
    non_matmul_cpu_s: float  # of one layer on the host over `passes`
    non_matmul_device_s: float
    offloaded: tuple[bool, ...] = ()  # for each operator, whether llama.cpp offloads it in large batches; (): none
    host_attention_s: float = 0.0  # added to non_matmul_cpu_s if mul-mats around attention are split: not offloaded
    to_first: TransferRates | None = None  # on a later device of several: rates of copies between the first and this

    @cached_property
    def sides_s(self) -> tuple[tuple[float, float], ...]:
        """(T_c, T_g or infinite) of each operator."""
        return tuple((cost.t_cpu_s, inf if cost.t_gpu_s is None else cost.t_gpu_s) for cost in self.operators)

    @cached_property
    def large(self) -> tuple[Pass, ...]:
        """The passes that are offloaded."""
        return by_offload(self.passes)[0]

    @cached_property
    def small(self) -> tuple[Pass, ...]:
        """The other passes."""
        return by_offload(self.passes)[1]

    def non_matmul_seconds(self, first_device_layer: int, window: tuple[int, int]) -> float:
        """Seconds of the non-matmul work of the window's layers; that of layers from first_device_layer on is on the
        device."""
        low, high = (min(layer, self.graph.n_computed) for layer in window)
        n_host_layers = min(max(first_device_layer, low), high) - low
        return (high - low - n_host_layers) * self.non_matmul_device_s + n_host_layers * self.non_matmul_cpu_s

    @property
    def layouts(self) -> tuple[str, ...]:
        """The host layout of each operator."""
        return tuple(cost.layout for cost in self.operators)


def placement_seconds(
    costs: Costs,
    on_device: Sequence[bool],
    first_device_layer: int,
    sliced: Collection[int] = (),
    window: tuple[int, int] | None = None,
) -> float:
    """Predicted total seconds of all passes under a placement of whole operators.

    on_device: one entry per operator, in the order of costs.operators. first_device_layer: as in graph.device_copies.
    sliced: operators whose blocks are priced in cost/slices.py; they add no time here. window: layers [first, last)
    that are priced; None: all.
    """
    first, last = (0, len(on_device)) if window is None else costs.graph.operators_of(window)
    seconds: Iterable[float] = map(getitem, costs.sides_s[first:last], on_device[first:last])
    if sliced:
        seconds = compress(seconds, [i not in sliced for i in range(first, last)])
    total = sum(seconds)
    if total == inf or (window is not None and window[0] >= window[1]):
        return total
    total += costs.non_matmul_seconds(first_device_layer, window or (0, costs.graph.n_layer))
    return total + transfer_seconds(costs, on_device, first_device_layer, window, sliced)


def transfer_seconds(
    costs: Costs,
    on_device: Sequence[bool],
    first_device_layer: int,
    window: tuple[int, int] | None = None,
    sliced: Collection[int] = (),
) -> float:
    """Seconds of device copies over all passes, in the layers of the window (None: all). In large batches offloaded
    operators count as on the device, with norms and attention; sliced ones are never offloaded. On a later device of
    several, operators are offloaded to the first device, and their inputs and results are copied there and back."""

    def seconds(
        sides: Sequence[bool], first_layer: int, passes: Sequence[Pass], rates: TransferRates = costs.rates
    ) -> float:
        return rates.seconds_over(device_copies(costs.graph, sides, first_layer, window), passes) if passes else 0.0

    first, last = (0, len(on_device)) if window is None else costs.graph.operators_of(window)
    if costs.to_first is not None:
        crosses = any(costs.offloaded[i] and not on_device[i] and i not in sliced for i in range(first, last))
        large_s = seconds(on_device, first_device_layer, costs.large, costs.to_first if crosses else costs.rates)
        return large_s + seconds(on_device, first_device_layer, costs.small)
    offloaded: Sequence[bool] = costs.offloaded if costs.large else ()
    if sliced:
        offloaded = [off and i not in sliced for i, off in enumerate(offloaded)]
    if not any(offloaded):
        return seconds(on_device, first_device_layer, costs.passes)
    sides = list(on_device)
    sides[first:last] = map(or_, on_device[first:last], offloaded[first:last])
    return seconds(sides, 0, costs.large) + seconds(on_device, first_device_layer, costs.small)


def cpu_seconds(costs: Costs, on_device: Sequence[bool], first_device_layer: int, sliced: Collection[int]) -> float:
    """The CPU's part of placement_seconds, without device copies."""
    n_layers = min(costs.graph.n_computed, first_device_layer)
    seconds = (
        cost.t_cpu_s
        for i, (cost, is_device) in enumerate(zip(costs.operators, on_device, strict=True))
        if not is_device and i not in sliced
    )
    return sum(seconds) + n_layers * costs.non_matmul_cpu_s
