"""From a policy's name to a verified placement: propose with predicted costs, verify with what a load really takes.

Pure but for `probe`, which the caller gives: it answers what a placement puts on the device (a no_alloc load, DESIGN
2.10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.types import CPU_DEVICE, MemoryLedger, Operator, Phase, Predicted, Profile, Workload
from oallama.core.units import format_bytes
from oallama.cost.graph import Graph
from oallama.cost.operator_cost import index_cases, operator_costs, passes
from oallama.cost.predict import Costs, index_rest, predicted, rest_of
from oallama.cost.transfer import transfer_rates, weight_stream
from oallama.place.baselines import Placed, cpu, layers
from oallama.place.budget import DeviceMemory, ledger
from oallama.place.fill import FillRule
from oallama.place.oato import AffinityRule, search

POLICIES = ("auto", "oato", "layers", "cpu")
LATER_POLICIES = ("scheinfer", "hetegen", "twinpilots", "fit", "flexgen", "fiddler")
"""Policies of the contract that need the split backend, which this version does not have."""

SMALLEST_UBATCH = 64
VERIFY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class LoadBytes:
    """What a placement takes, bytes: weights, KV and compute buffers on the device, weights on the host, and the
    device's free memory before the load."""

    weights_gpu: int
    weights_host: int
    kv: int
    compute: int
    device_free: int


Probe = Callable[[Workload, Placed], LoadBytes]


@dataclass(frozen=True, slots=True)
class Problem:
    """One model on one device: what a decision is made from."""

    operators: tuple[Operator, ...]
    graph: Graph
    profile: Profile
    probe: Probe
    vram: int | None  # plan as if the device had so many bytes; None: what is free
    vram_fill: float
    gpu_weights: float | None  # cap on the share of operator bytes on the device


@dataclass(frozen=True, slots=True)
class Decision:
    """A verified placement, with everything a report or a plan says of it."""

    policy: str
    workload: Workload
    costs: Costs  # over the phase that was asked for
    placed: Placed
    memory: MemoryLedger
    predicted: Predicted
    notes: tuple[str, ...]


def decide(
    problem: Problem,
    policy: str,
    load: Workload,
    phase: Phase,
    affinity: AffinityRule = "default",
    fill: FillRule = "continue",
) -> Decision:
    """The placement of a policy for a workload; "auto" takes the one with the least predicted time.

    Raises UsageError for a policy this version does not have, DoesNotFit where the policy needs the device and not
    even KV and compute buffers of one layer fit.
    """
    if policy in LATER_POLICIES:
        raise UsageError(f"policy {policy} is not in this version; choose one of {', '.join(POLICIES)}")
    if policy not in POLICIES:
        raise UsageError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if policy == "cpu" or problem.profile.device == CPU_DEVICE:
        return _on_cpu(problem, load, phase)
    asked = load
    memory, load, notes = _device_memory(problem, asked, required=policy != "auto")
    if memory is None:
        return replace(_on_cpu(problem, asked, phase), notes=notes)
    candidates = ("oato", "layers", "cpu") if policy == "auto" else (policy,)
    decisions = [
        _on_cpu(problem, asked, phase)
        if candidate == "cpu"
        else _verified(problem, candidate, load, asked, phase, memory, affinity, fill)
        for candidate in candidates
    ]
    best = min(decisions, key=lambda decision: decision.placed.seconds)
    if best.placed.first_device_layer > problem.graph.n_layer:
        return best  # without the device, nothing had to be lowered for it
    return replace(best, notes=(*notes, *best.notes))


def decide_as_given(problem: Problem, placed: Placed, load: Workload, policy: str) -> Decision:
    """A placement of the caller's own, priced for the workload and probed but not changed: `spare` may be negative."""
    costs = costs_of(problem, load, "mixed")
    taken = problem.probe(load, placed)
    capacity = taken.device_free if problem.vram is None else problem.vram
    memory = ledger(capacity, problem.vram_fill, taken.weights_gpu, taken.weights_host, taken.kv, taken.compute)
    return Decision(policy, load, costs, placed, memory, _predicted(problem, load, placed), ())


def costs_of(problem: Problem, load: Workload, phase: Phase) -> Costs:
    profile = problem.profile
    over = passes(load, phase)
    priced = operator_costs(
        index_cases(profile), problem.operators, problem.graph.n_layer, profile.device, over, weight_stream(profile)
    )
    return Costs(
        priced, problem.graph, transfer_rates(profile), over, *rest_of(index_rest(profile), profile.device, over)
    )


def _predicted(problem: Problem, load: Workload, placed: Placed) -> Predicted:
    prefill, decode = (costs_of(problem, load, phase) for phase in ("prefill", "decode"))
    return predicted(prefill, decode, placed.on_device, placed.first_device_layer, load)


def _on_cpu(problem: Problem, load: Workload, phase: Phase) -> Decision:
    costs = costs_of(problem, load, phase)
    placed = cpu(costs)
    taken = problem.probe(load, placed)
    memory = ledger(0, problem.vram_fill, 0, taken.weights_host, 0, 0)
    return Decision("cpu", load, costs, placed, memory, _predicted(problem, load, placed), ())


def _device_memory(
    problem: Problem, load: Workload, required: bool
) -> tuple[DeviceMemory | None, Workload, tuple[str, ...]]:
    """What the device holds before any operator, from a probe with every operator on the host.

    Halves the micro-batch while KV and compute buffers leave no room; if they never do, lets layers keep their KV on
    the host; if not even the output layer's buffers fit: None, or DoesNotFit where the policy needs the device.
    """
    total = sum(operator.bytes for operator in problem.operators)
    asked = load.n_ubatch
    while True:
        taken = problem.probe(load, Placed((False,) * len(problem.operators), 0, 0, True, 0.0))
        memory = DeviceMemory(
            capacity=taken.device_free if problem.vram is None else problem.vram,
            fill=problem.vram_fill,
            kv=taken.kv,
            compute=taken.compute,
            other_weights=taken.weights_gpu,
            n_layer=problem.graph.n_layer,
            operators_limit=None if problem.gpu_weights is None else int(problem.gpu_weights * total),
        )
        if memory.operator_room(0) >= 0 or load.n_ubatch // 2 < SMALLEST_UBATCH:
            break
        load = replace(load, n_ubatch=load.n_ubatch // 2)
    notes = []
    if load.n_ubatch != asked:
        notes.append(f"micro-batch lowered from {asked} to {load.n_ubatch} tokens to shrink the compute buffers")
    if memory.operator_room(0) >= 0:
        return memory, load, tuple(notes)
    if memory.operator_room(problem.graph.n_layer) >= 0:
        notes.append(
            f"the KV cache ({format_bytes(memory.kv)}) does not fit the device whole: "
            "some layers keep theirs on the host"
        )
        return memory, load, tuple(notes)
    needed = memory.kv + memory.compute + memory.other_weights
    if required:
        raise DoesNotFit(needed, memory.limit, problem.profile.device, "KV cache and compute buffers")
    note = (
        f"KV cache and compute buffers need {format_bytes(needed)} even at a micro-batch of {load.n_ubatch} tokens and "
        f"the device may hold {format_bytes(memory.limit)}: everything stays on the CPU"
    )
    return None, replace(load, n_ubatch=asked), (note,)


def _verified(
    problem: Problem,
    policy: str,
    load: Workload,
    asked: Workload,
    phase: Phase,
    memory: DeviceMemory,
    affinity: AffinityRule,
    fill: FillRule,
) -> Decision:
    """Propose a placement, ask what it really takes, and take what is too much off the budget until it fits.

    load is asked, with the micro-batch lowered as the device needs; a placement that leaves it empty is for asked."""
    costs = costs_of(problem, load, phase)
    overrun = 0
    for _ in range(VERIFY_ROUNDS):
        placed = _propose(policy, costs, problem.operators, memory, overrun, affinity, fill)
        if placed.first_device_layer > problem.graph.n_layer:
            return _nothing_placed(problem, policy, asked, phase, memory)
        taken = problem.probe(load, placed)
        real = ledger(memory.capacity, memory.fill, taken.weights_gpu, taken.weights_host, taken.kv, taken.compute)
        if real.spare >= 0:
            return Decision(policy, load, costs, placed, real, _predicted(problem, load, placed), ())
        overrun -= real.spare
    raise DoesNotFit(real.limit - real.spare, real.limit, problem.profile.device, f"the {policy} placement")


def _nothing_placed(problem: Problem, policy: str, load: Workload, phase: Phase, memory: DeviceMemory) -> Decision:
    """The device stays empty: said why, with the device's ledger."""
    decision = _on_cpu(problem, load, phase)
    device = problem.profile.device
    reason = (
        "no layer fits the device"
        if policy == "layers"
        else f"with crossings counted, no operator is predicted to be faster on {device} (--fill full uses it anyway)"
    )
    empty = ledger(memory.capacity, memory.fill, 0, decision.memory.weights_host, 0, 0)
    return replace(decision, policy=policy, memory=empty, notes=(f"nothing is placed on {device}: {reason}",))


def _propose(
    policy: str,
    costs: Costs,
    operators: Sequence[Operator],
    memory: DeviceMemory,
    overrun: int,
    affinity: AffinityRule,
    fill: FillRule,
) -> Placed:
    def budget(first_device_layer: int) -> int:
        return memory.operator_room(first_device_layer) - overrun

    if policy == "layers":
        return layers(costs, budget)
    return search(costs, operators, budget, affinity=affinity, rule=fill)
