"""A placement problem: costs, a no_alloc load that says what a placement takes, and the memory breakdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import (
    CPU_DEVICE,
    PLAIN_LAYOUT,
    DecodeStep,
    FlashAttention,
    MemoryBreakdown,
    Operator,
    Phase,
    Workload,
)
from oallama.core.units import format_bytes
from oallama.cost.blocks import can_split
from oallama.cost.experts import mean_gaps
from oallama.cost.graph import Graph
from oallama.cost.kernels import Kernels, index_non_matmul, non_matmul_seconds
from oallama.cost.passes import Pass
from oallama.cost.passes import passes as workload_passes
from oallama.cost.ranges import DeviceCosts
from oallama.cost.rates import between_devices, transfer_rates, weight_stream
from oallama.cost.whole import (
    Costs,
    host_cache,
    is_around_attention,
    non_matmul_with_offload,
    offloaded,
    offloads_attention,
    operator_costs,
)
from oallama.planner.memory import DeviceMemory, memory_breakdown, summed
from oallama.planner.placement import DeviceSlices, Placement, all_on_cpu, operators_on_cpu, whole_bytes
from oallama.planner.runtime import runtime_bytes

SMALLEST_UBATCH = 64
"""Tokens; a micro-batch is not lowered below this. 16 and 256 change none of 26 plans."""


@dataclass(frozen=True, slots=True)
class LoadBytes:
    """Bytes that llama.cpp takes with a placement: weights, KV and compute buffers on the device, weights on the host;
    and the device's free memory before the load. devices: one record for each of several devices, without weights on
    the host; this record is their sum."""

    weights_gpu: int
    weights_host: int
    kv: int
    compute: int
    device_free: int
    devices: tuple[LoadBytes, ...] = ()


NoAllocLoad = Callable[[Workload, Placement], LoadBytes]


@dataclass(frozen=True)
class Problem:
    """One model on one device, as input of the planner. With several devices: the model on the first device, with
    `no_alloc_load` for placements over all of them, and in `devices` a problem for each alone."""

    operators: tuple[Operator, ...]
    graph: Graph
    profile: Profile
    no_alloc_load: NoAllocLoad
    vram: int | None  # bytes of device memory to plan with; None: the free memory
    vram_fill: float
    gpu_weights: float | None  # cap on the share of operator bytes on the device
    host_copies_limit: int = 0  # bytes of host memory for second copies of weights
    routing: Routing | None = None  # expert counts, if recorded
    step: DecodeStep = DecodeStep()  # of decode; its tokens share experts  # noqa: RUF009 - frozen
    flash_attn: FlashAttention = "auto"  # the mode of the profile's attention; "auto": all of them
    allows: Callable[[Workload], bool] = lambda workload: True  # whether attention may have this micro-batch
    devices: tuple[Problem, ...] = ()  # (): one device
    first: Problem | None = None  # of layers on a later device of several (planner/parts.py): the same on the first

    def __post_init__(self) -> None:
        layers = [inf if operator.layer is None else operator.layer for operator in self.operators]
        if any(previous > layer for previous, layer in pairwise(layers)):
            raise UsageError("encoder-decoder models are not supported on a device: run it with --device none")

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.profile, self.step, () if self.routing is None else mean_gaps(self.routing))

    @cached_property
    def splittable(self) -> tuple[bool, ...]:
        """Whether each operator can be split."""
        return tuple(can_split(o) and self.kernels.on_device(o) is not None for o in self.operators)

    def of_step(self, step: DecodeStep) -> Problem:
        """The problem for another decode step; the same problem for a model without experts."""
        step = DecodeStep(step.n_parallel, step.n_draft)
        if step == self.step or all(not operator.routed for operator in self.operators):
            return self
        devices, first = tuple(device.of_step(step) for device in self.devices), self.first and self.first.of_step(step)
        return replace(self, step=step, devices=devices, first=first)

    def runtime_bytes(self, workload: Workload, n_instances: int = 1) -> int:
        """Bytes that n_instances instances of the device's back end take for themselves."""
        facts, cases = self.profile.fingerprint, self.profile.rest
        plain = any(case.device == self.profile.device and not case.shape.flash_attn for case in cases)
        described = str(facts.get("device_backend")), str(facts.get("device_description"))
        return runtime_bytes(*described, self.operators, workload.n_ubatch, plain, n_instances)

    def capacity(self, load: LoadBytes) -> int:
        """Bytes of the device to plan with: vram, else what was free before the load."""
        return load.device_free if self.vram is None else self.vram


def costs_of(problem: Problem, workload: Workload, phase: Phase, llama_uses_device: bool = True) -> Costs:
    """Prices over the passes of a phase. llama_uses_device: whether llama.cpp is given the device, to which it may
    stream plain host weights."""
    return costs_over(problem, workload_passes(workload, phase), llama_uses_device)


def costs_over(
    problem: Problem, passes: tuple[Pass, ...], llama_uses_device: bool = True, layouts: Sequence[str] | None = None,
    mapped: bool = True,
) -> Costs:  # fmt: skip
    """Prices over these passes. layouts: host layout of each operator; None: the fastest over these passes, together
    with attention, which llama.cpp offloads only if all mul-mats around it are. mapped: whether llama.cpp maps the
    file, as it does unless operators are sliced."""
    if problem.first is not None:
        first = costs_over(problem.first, passes, llama_uses_device, layouts, mapped)
        own_costs = costs_over(replace(problem, first=None), passes, llama_uses_device, layouts, mapped)
        return _on_later_device(own_costs, problem.profile, first, problem.first.profile)
    profile, n_run = problem.profile, problem.graph.n_run
    stream = weight_stream(profile, mapped) if llama_uses_device else None

    def priced(layouts: Sequence[str] | None) -> Costs:
        operators = operator_costs(problem.kernels, problem.operators, n_run, passes, stream, layouts)
        cache = host_cache(profile) if stream and offloads_attention(problem.operators, operators) else None
        index = index_non_matmul(profile)
        on_cpu_s, on_device_s = non_matmul_with_offload(index, profile.device, passes, cache)
        return Costs(
            operators,
            problem.graph,
            transfer_rates(profile),
            passes,
            on_cpu_s,
            on_device_s,
            offloaded(problem.operators, operators, n_run) if cache else (),
            non_matmul_seconds(index, CPU_DEVICE, passes) - on_cpu_s,
        )

    fastest = priced(layouts)
    if layouts is not None or stream is None or fastest.offloaded or not fastest.large:
        return fastest
    operator_layouts = zip(problem.operators, fastest.layouts, strict=True)
    plain = priced([PLAIN_LAYOUT if is_around_attention(operator) else layout for operator, layout in operator_layouts])
    return min(fastest, plain, key=lambda costs: all_on_cpu(costs).seconds)


def device_costs(
    problem: Problem, passes: tuple[Pass, ...], layouts: Sequence[str] | None = None, mapped: bool = True
) -> tuple[DeviceCosts, ...]:
    """Prices over these passes on each of several devices. layouts, mapped: as in costs_over."""
    first, *others = (costs_over(device, passes, layouts=layouts, mapped=mapped) for device in problem.devices)
    by_device = [DeviceCosts(first, (), problem.devices[0].profile.is_remote)]
    for number, costs in enumerate(others, start=1):
        *earlier_profiles, profile = (device.profile for device in problem.devices[: number + 1])
        entered = tuple(between_devices(earlier, profile) for earlier in earlier_profiles)
        by_device.append(
            DeviceCosts(_on_later_device(costs, profile, first, earlier_profiles[0]), entered, profile.is_remote)
        )
    return tuple(by_device)


def _on_later_device(costs: Costs, profile: Profile, first: Costs, first_profile: Profile) -> Costs:
    """Prices on a later one of several devices. In large batches llama.cpp streams host weights to the first device
    only, which computes with them; so inputs and results are copied between these two devices."""
    operators = tuple(
        replace(host_cost, t_gpu_s=device_cost.t_gpu_s)
        for host_cost, device_cost in zip(first.operators, costs.operators, strict=True)
    )
    if not any(first.offloaded):
        return replace(costs, operators=operators, offloaded=())
    rates = replace(
        costs.rates,
        copy_in=between_devices(first_profile, profile),
        copy_out=between_devices(profile, first_profile),
        split_s=costs.rates.split_s + first.rates.split_s,
    )
    return replace(costs, operators=operators, offloaded=first.offloaded, to_first=rates)


def with_layouts(problem: Problem, workload: Workload, placement: Placement) -> Placement:
    """`placement` with the host layouts that its plan names. A split operator always has one, as the split back end
    chooses none. Other operators get their fastest layout if llama.cpp's own choice would be pinned plain memory
    (has_host_buffer), except in a stock configuration."""
    if not problem.profile.has_host_buffer or placement.stock is not None:
        return placement
    llama_uses_device = placement.llama_uses_device(problem.graph.n_layer)
    layouts = costs_of(problem, workload, "mixed", llama_uses_device).layouts
    assignments = (
        p._replace(layout=p.layout or other) for p, other in zip(placement.assignments, layouts, strict=True)
    )
    return replace(placement, assignments=tuple(assignments))


def placed_bytes(problem: Problem, placement: Placement) -> int:
    """Bytes on the device of operators, slices with their staging, and the expert cache."""
    return (
        whole_bytes(problem.operators, placement.on_device)
        + placement.first_slices.device_bytes
        + placement.cache_bytes
    )


def memory_of(problem: Problem, workload: Workload, placement: Placement) -> MemoryBreakdown:
    """The memory breakdown of a placement: llama.cpp's part by a no_alloc load, in which split operators are on the
    host, plus the split back end's slices. `spare` may be negative."""
    load = problem.no_alloc_load(workload, placement)
    weights_host = load.weights_host + sum(slices.twice_bytes - slices.gg_bytes for slices in placement.device_slices)

    def of_device(device: Problem, load: LoadBytes, slices: DeviceSlices, n_instances: int) -> MemoryBreakdown:
        """n_instances: of the device's back end, llama.cpp's and the split back end's."""
        return memory_breakdown(
            device.capacity(load), device.vram_fill, load.weights_gpu + slices.held_bytes, 0, load.kv, load.compute,
            slices.staging_bytes, device.runtime_bytes(workload, n_instances),
        )  # fmt: skip

    if placement.device_layers:
        devices = zip(problem.devices, load.devices, placement.device_slices, strict=True)
        return summed(tuple(of_device(*device, 1 + device[2].is_sliced) for device in devices), weights_host)
    load = replace(load, weights_gpu=load.weights_gpu + placement.cache_bytes)
    n_instances = placement.llama_uses_device(problem.graph.n_layer) + placement.is_sliced
    return replace(of_device(problem, load, placement.first_slices, n_instances), weights_host=weights_host)


def operators_limit(problem: Problem) -> int | None:
    """Bytes that operators may take on the device under --gpu-weights; None: no cap."""
    if problem.gpu_weights is None:
        return None
    return int(problem.gpu_weights * sum(operator.bytes for operator in problem.operators))


def cpu_alone(problem: Problem, workload: Workload, phase: Phase) -> Placement:
    """The placement with everything on the CPU, priced without a device: no weights are streamed."""
    return all_on_cpu(costs_of(problem, workload, phase, llama_uses_device=False))


def operators_on_host(problem: Problem, workload: Workload) -> Placement:
    """The placement with all operators on the host, and norms and KV of all layers on the device."""
    return with_layouts(problem, workload, operators_on_cpu(len(problem.operators), 0))


def empty_memory(problem: Problem, workload: Workload) -> DeviceMemory:
    """Memory of the device before any operator is placed, with norms and KV of all layers there: by a no_alloc load."""
    return memory_before(problem, workload, problem.no_alloc_load(workload, operators_on_host(problem, workload)))


def memory_before(problem: Problem, workload: Workload, load: LoadBytes) -> DeviceMemory:
    """Memory of the device before any operator is placed. load: of operators_on_host."""
    return DeviceMemory(
        capacity=problem.capacity(load),
        fill=problem.vram_fill,
        kv=load.kv,
        compute=load.compute,
        other_weights=load.weights_gpu,
        n_layer=problem.graph.n_layer,
        operators_limit=operators_limit(problem),
        runtime=problem.runtime_bytes(workload),
        runtime_with_split=problem.runtime_bytes(workload, 2),
    )


def device_memory(
    problem: Problem, workload: Workload, required: bool
) -> tuple[DeviceMemory | None, Workload, tuple[str, ...]]:
    """(memory of the device before any operator is placed, the workload with its micro-batch lowered if needed, notes).

    Halves the micro-batch while KV and compute buffers leave no room. If even the smallest leaves none, layers may keep
    their KV on the host, with the largest micro-batch whose buffers fit without KV. If those do not fit either: None,
    or DoesNotFit if the policy requires the device.
    """
    requested = workload
    tried = [(empty_memory(problem, workload), workload)]
    while tried[-1][0].operator_budget(0) < 0 and workload.n_ubatch // 2 >= SMALLEST_UBATCH:
        workload = replace(workload, n_ubatch=workload.n_ubatch // 2)
        tried.append((empty_memory(problem, workload), workload))
    memory, workload = tried[-1]
    notes: list[str] = []
    if memory.operator_budget(0) < 0:
        fitting = next((pair for pair in tried if pair[0].operator_budget(problem.graph.n_layer) >= 0), None)
        if fitting is None:
            needed = memory.kv + memory.compute + memory.other_weights
            if required:
                raise DoesNotFit(needed, memory.limit, problem.profile.device, "KV cache and compute buffers")
            note = (
                f"KV cache and compute buffers need {format_bytes(needed)} even with {workload.n_ubatch}-token "
                f"micro-batches; the device may hold {format_bytes(memory.limit)}: everything stays on the CPU"
            )
            return None, requested, (note,)
        memory, workload = fitting
        kv = format_bytes(memory.kv)
        notes.append(f"the KV cache ({kv}) does not fit the device: some layers keep their part on the host")
    if workload != requested:
        lowered = f"lowered from {requested.n_ubatch} to {workload.n_ubatch} tokens"
        notes.insert(0, f"micro-batch {lowered} to shrink the compute buffers")
    return memory, workload, tuple(notes)
