"""The registry of policies, and the search that each one runs: propose, verify, correct the memory.

A policy is a function from a problem and its inputs to proposed placements. best_verified takes the fastest that
fits, by no_alloc loads. `@policy(name, help)` makes a Policy of such a function and registers its name in this process;
`Placer.plan` also accepts the Policy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any, get_args

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.extensions import extension_names, load_extension
from oallama.core.types import FlashAttention, Phase, PrefetchMode, StreamSettings, Workload
from oallama.cost.whole import Costs
from oallama.planner.affinity import AffinityRule, FillRule
from oallama.planner.memory import CorrectedMemory, DeviceMemory, for_weights
from oallama.planner.placement import NO_PLACEMENT, Placement, VerifiedPlan
from oallama.planner.problem import Problem, costs_of, device_memory, empty_memory, placed_bytes
from oallama.planner.slicer import Slicer, pricing_of
from oallama.planner.verify import nothing_placed, on_cpu, verify


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of a policy: OATO's affinity and fill, and how far copies of streamed weights run ahead. Raises
    UsageError for unknown values."""

    affinity: AffinityRule = "default"
    fill: FillRule = "continue"
    prefetch: PrefetchMode = "ahead"

    def __post_init__(self) -> None:
        for name, known in (("affinity", AffinityRule), ("fill", FillRule), ("prefetch", PrefetchMode)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(get_args(known))}")

    @property
    def need_oato(self) -> bool:
        """Whether an option that only OATO has differs from its default."""
        return (self.affinity, self.fill) != ("default", "continue")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the planner."""

    workload: Workload
    policy: Policy | None = None  # None: the fastest by prediction (`auto`)
    phase: Phase = "mixed"  # whose time counts
    rules: Rules = Rules()
    n_ubatches: Sequence[int] = ()  # micro-batches above the workload's that may be taken instead
    quick: bool = False  # search less: what-if plans for many devices
    required: bool = True  # raise DoesNotFit where the device has no room, else leave everything on the CPU


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Input of a policy: prices of the workload, and the device's memory."""

    request: Request
    workload: Workload  # its micro-batch may be smaller than the requested one
    costs: Costs  # over the phase
    memory: DeviceMemory  # before any operator
    slicer: Callable[..., Slicer]  # prices of blocks that are cut, for a workload
    llama_uses_device: bool = True  # False: llama.cpp runs on the CPU alone, so only slices may be on the device
    allows_slices_only: bool = False  # True: slices alone are possible, too: llama.cpp uses another device
    is_later_device: bool = False  # True: norms and KV of all layers are on the device (a later one of several)
    notes: tuple[str, ...] = ()  # what was lowered so that llama.cpp's buffers fit
    to_beat_s: float = inf  # seconds of the fastest proposal so far

    def operator_bytes(self, first_device_layer: int) -> int:
        """Bytes for whole operators beside norms and KV of the layers from first_device_layer on. Negative: norms and
        KV do not fit."""
        if self.is_later_device and first_device_layer > 0:
            return -1
        return self.memory.operator_budget(first_device_layer)

    @property
    def first_device_layer(self) -> int:
        """The lowest first_device_layer whose norms and KV fit the device."""
        n_layer = self.memory.n_layer
        return next((first for first in range(n_layer) if self.memory.with_split_instance.budget(first) >= 0), n_layer)

    def cut_bytes(self, first_device_layer: int | None = None, used: int = 0) -> tuple[int, int]:
        """(bytes for slices with their staging, bytes for slices alone) beside norms and KV of the layers from
        first_device_layer on and `used` bytes of whole operators. None: as many layers as fit."""
        memory = self.memory.with_split_instance if self.llama_uses_device else self.memory
        budget = memory.budget(self.first_device_layer if first_device_layer is None else first_device_layer) - used
        return budget, for_weights(budget, memory.operators_limit, used)


Propose = Callable[[Problem, PolicyInputs], Iterable[Placement]]
Place = Callable[[Problem, Request], VerifiedPlan]
Finish = Callable[[VerifiedPlan, bool], VerifiedPlan]
"""(the plan, whether `auto` took it) -> the plan with its name and notes."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy by name. place: makes the verified placement of a request."""

    name: str
    help: str  # what it does, in a few words
    place: Place
    streams: bool = False  # whether it may stream weights, so that Rules.prefetch applies
    caveat: str = ""  # of another system's policy: what this version lacks; becomes a note of its plans
    has_rules: bool = False  # whether Rules.affinity and Rules.fill apply
    takes_ngl: bool = False  # whether -ngl chooses it
    uses_device: bool = True
    by_llama_cpp: bool = False  # llama.cpp's --fit places on real devices; `place` predicts that for described ones
    is_given: bool = False  # a placement of the caller, which must not change
    attention: FlashAttention | None = None  # unless the user asks for another; None: the faster by prediction
    keeps_ubatch: bool = False  # the micro-batch is part of the policy, so that no larger one is tried
    finish: Finish = lambda verified, is_auto: verified  # sets the name and notes of its plans


POLICIES: dict[str, Policy] = {}
"""Policies by name, in the order of the help: ours, and those of other packages once they are imported."""

EXTENSIONS = "oallama.policies"
"""Group of entry points, each named after the policy that its module registers."""


def find_policy(name: str) -> Policy | None:
    """The policy of this name; imports the package that offers it. Raises UsageError if that fails."""
    if name not in POLICIES:
        is_offered = load_extension(EXTENSIONS, name) is not None
        if is_offered and name not in POLICIES:
            raise UsageError(
                f"the package that offers policy {name} does not register it; use @policy({name!r}, …) in its module"
            )
    return POLICIES.get(name)


def policy_names() -> tuple[str, ...]:
    """The names of all policies, without importing other packages."""
    return tuple(dict.fromkeys((*POLICIES, *extension_names(EXTENSIONS))))


def register(new: Policy) -> Policy:
    POLICIES[new.name] = new
    return new


def policy(
    name: str, help: str, *, reason: str = "", slices_alone: bool = False, **more: Any
) -> Callable[[Propose], Policy]:
    """Make a policy of a function, and register it. reason: the note of a plan that leaves the device empty because the
    function yields no placement that uses it. slices_alone: propose also with llama.cpp on the CPU and only slices on
    the device. more: further fields of Policy."""
    reason = reason or f"{name} found no placement that fits"

    def decorator(propose: Propose) -> Policy:
        place = partial(best_verified, name=name, propose=propose, reason=reason, slices_alone=slices_alone)
        return register(Policy(name, help, place, **more))

    return decorator


ROUNDS = 6
"""Most no_alloc loads of a search, each of which costs seconds for a large model. With four nothing fits on 135 of
5,000 drawn devices (ENOUGH_USED), with eight the same as with six."""


def best_verified(
    problem: Problem, request: Request, name: str, propose: Propose, reason: str, slices_alone: bool = False
) -> VerifiedPlan:
    """The fastest verified placement of those that `propose` yields. (With affinity "paper": the one that leaves the
    least memory unused.)

    Only a no_alloc load tells what llama.cpp takes beside operators. So each round verifies the fastest proposal, then
    corrects its memory and proposes again: with less memory if the placement did not fit, with more if it left some. If
    no proposal uses the device, everything is placed on the CPU, for the requested workload.
    """
    starts, notes = inputs_of(problem, request, slices_alone)
    if not starts:
        return replace(on_cpu(problem, request.workload, request.phase), notes=notes)
    capacity, corrected = starts[0].memory.capacity, [CorrectedMemory(start.memory) for start in starts]
    proposed: dict[int, Placement] = {}  # by number of the inputs
    best: VerifiedPlan | None = None
    last: VerifiedPlan | None = None
    improvable = list(range(len(starts)))

    def key(verified: VerifiedPlan) -> float:
        return verified.memory.spare if request.rules.affinity == "paper" else verified.placement.seconds

    for _ in range(ROUNDS):
        for i in improvable:
            to_beat_s = min((proposal.seconds for proposal in proposed.values()), default=inf)
            inputs = replace(starts[i], memory=corrected[i].memory, to_beat_s=to_beat_s)
            placements = list(propose(problem, inputs))
            if any(placement.seconds <= 0 for placement in placements):
                raise UsageError(
                    f"policy {name} yields a placement without predicted seconds; create it with placed_whole or "
                    "Slicer.placed"
                )
            fastest = min(placements, key=lambda placement: placement.seconds, default=NO_PLACEMENT)
            if fastest.seconds < inf:  # else the device cannot compute an operator that was placed there
                proposed[i] = fastest
        i = min(proposed, key=lambda i: proposed[i].seconds, default=-1)
        if i < 0 or not proposed[i].uses_device(problem.graph.n_layer):
            last = None
            break
        placement, inputs = proposed.pop(i), starts[i]
        workload = replace(inputs.workload, n_ubatch=placement.n_ubatch or inputs.workload.n_ubatch)
        last = verify(problem, name, workload, placement, inputs.notes)
        if last.memory.spare >= 0 and (best is None or key(last) < key(best)):
            best = last
            proposed = {i: placement for i, placement in proposed.items() if placement.seconds < last.placement.seconds}
        learned = corrected[i].learn(
            last.placement.first_device_layer, placed_bytes(problem, last.placement), last.memory
        )
        improvable = [i] if learned else []
    if best is not None:
        return best
    if last is not None and request.required:
        real = last.memory
        raise DoesNotFit(real.limit - real.spare, real.limit, problem.profile.device, f"the {name} placement")
    why = reason if last is None else "no placement that was tried fits"
    return nothing_placed(problem, name, request.workload, request.phase, capacity, why)


def inputs_of(
    problem: Problem, request: Request, slices_alone: bool = False
) -> tuple[list[PolicyInputs], tuple[str, ...]]:
    """The inputs to propose for (with llama.cpp on the device; for slices alone), and notes: what was lowered, or why
    there are none."""
    streaming = StreamSettings(prefetch=request.rules.prefetch)
    slicer = cache(lambda workload, **may: Slicer(problem, workload, pricing_of(problem, streaming), **may))
    starts: list[PolicyInputs] = []
    memory, workload, notes = device_memory(problem, request.workload, request.required and not slices_alone)
    if memory is not None:
        starts.append(
            PolicyInputs(request, workload, costs_of(problem, workload, request.phase), memory, slicer, notes=notes)
        )
    if slices_alone:
        memory = replace(empty_memory(problem, request.workload), kv=0, compute=0, other_weights=0)
        costs = costs_of(problem, request.workload, request.phase, llama_uses_device=False)
        starts.append(PolicyInputs(request, request.workload, costs, memory, slicer, llama_uses_device=False))
    return starts, notes
