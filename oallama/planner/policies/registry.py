"""Policies: each says where operators go, for the prices of a workload and the memory that a device has.

A policy is a function from a problem and a memory budget to placements. The fastest one that fits is taken, after
no_alloc loads (best_verified). `@policy(name, help)` makes one; in this process it is then known by that name, and
`Placer.plan` takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any, get_args

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.plugins import load_offered, offered
from oallama.core.types import FlashAttention, Phase, PrefetchMode, StreamSettings, Workload
from oallama.cost.passes import Pass
from oallama.cost.whole import Costs
from oallama.planner.affinity import AffinityRule, FillRule
from oallama.planner.memory import CorrectedBudget, DeviceMemory, for_weights
from oallama.planner.placement import Placement, VerifiedPlan
from oallama.planner.problem import Problem, capacity_of, costs_of, device_memory, operators_limit, own_bytes
from oallama.planner.slicer import Slicer, pricing_of
from oallama.planner.verify import nothing_placed, on_cpu, verify


@dataclass(frozen=True, slots=True)
class Rules:
    """What a caller may choose of how a policy places: OATO's affinity and fill, and how far copies of streamed weights
    run ahead. Raises UsageError for what there is not."""

    affinity: AffinityRule = "default"
    fill: FillRule = "continue"
    prefetch: PrefetchMode = "ahead"

    def __post_init__(self) -> None:
        for name, known in (("affinity", AffinityRule), ("fill", FillRule), ("prefetch", PrefetchMode)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(get_args(known))}")

    @property
    def need_oato(self) -> bool:
        """Whether some were chosen that only OATO has."""
        return (self.affinity, self.fill) != ("default", "continue")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the planner."""

    workload: Workload
    policy: Policy | None = None  # None: the fastest by prediction (`auto`)
    phase: Phase = "mixed"  # whose time counts
    rules: Rules = Rules()
    passes: Sequence[Pass] | None = None  # that attention is chosen for; None: the workload's
    n_ubatches: Sequence[int] = ()  # micro-batches above the workload's that may be taken instead
    quick: bool = False  # look at less, as many devices are asked about at once
    required: bool = True  # raise DoesNotFit where the device has no room, else leave everything on the CPU


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Prices of the workload, and the device's memory budget, that a policy places by."""

    request: Request
    workload: Workload  # its micro-batch may be smaller than the one that was asked for
    costs: Costs  # over the phase
    memory: DeviceMemory  # before any operator
    slicer: Callable[..., Slicer]  # prices of blocks that are cut, for a workload
    has_llama: bool = True  # False: llama.cpp is on the CPU alone, so that only slices may be on the device
    may_be_bare: bool = False  # beside llama.cpp too: it has layers on another device
    has_all_layers: bool = False  # whose norms and KV must be on the device: it is behind another one
    notes: tuple[str, ...] = ()  # on what was lowered to make this budget
    last: Placement | None = None  # what was proposed for this budget before it was corrected
    to_beat_s: float = inf  # of what is proposed for another budget

    def operator_bytes(self, first_device_layer: int) -> int:
        """Bytes for whole operators, with norms and KV of the layers from first_device_layer on; negative: these do not
        fit."""
        if self.has_all_layers and first_device_layer > 0:
            return -1
        return self.memory.operator_budget(first_device_layer)

    @property
    def first_device_layer(self) -> int:
        """The first layer from which on norms and KV fit the device."""
        n_layer = self.memory.n_layer
        return next((first for first in range(n_layer) if self.memory.beside_split.budget(first) >= 0), n_layer)

    def cut_bytes(self, first_device_layer: int | None = None, used: int = 0) -> tuple[int, int]:
        """(bytes for operators and what slices need beside them, bytes for weights alone), with norms and KV of the
        layers from this one on, and so many bytes of operators, on the device. None: of as many layers as fit."""
        memory = self.memory.beside_split if self.has_llama else self.memory
        budget = memory.budget(self.first_device_layer if first_device_layer is None else first_device_layer) - used
        return budget, for_weights(budget, memory.operators_limit, used)


Propose = Callable[[Problem, MemoryBudget], Iterable[Placement]]
Place = Callable[[Problem, Request], VerifiedPlan]
Finish = Callable[[VerifiedPlan, bool], VerifiedPlan]
"""(the decision, whether `auto` took it) -> the decision with its name and notes."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to place. place: the verified placement."""

    name: str
    help: str  # what it does, in a few words
    place: Place
    streams: bool = False  # whether it may stream weights, so that Rules.prefetch counts
    published: str = ""  # of another system's policy, what of it is not here
    has_rules: bool = False  # whether Rules.affinity and Rules.fill count
    takes_ngl: bool = False  # whether it is what -ngl asks for
    uses_device: bool = True
    by_llama_cpp: bool = False  # its own --fit places on a device that is here; `place` predicts that for others
    is_given: bool = False  # a placement of the caller's own, which stays as it is
    attention: FlashAttention | None = None  # where none is asked for; None: the faster by prediction
    finish: Finish = lambda decision, is_auto: decision  # as it is told

    @property
    def keeps_ubatch(self) -> bool:
        """Whether a larger micro-batch would not be what it stands for."""
        return bool(self.published) or self.by_llama_cpp or self.is_given


POLICIES: dict[str, Policy] = {}
"""Policies by name, in the order in which help lists them: ours, and those of other packages that were asked for."""

EXTENSIONS = "oallama.policies"
"""Entry points of this group are named as the policy that their module makes."""


def find_policy(name: str) -> Policy | None:
    """The policy of this name, which another package may have. Raises UsageError if that cannot be imported."""
    if name not in POLICIES:
        load_offered(EXTENSIONS, name)
    return POLICIES.get(name)


def policy_names() -> tuple[str, ...]:
    """The names of all policies; nothing is imported for them."""
    return tuple(dict.fromkeys((*POLICIES, *offered(EXTENSIONS))))


def register(new: Policy) -> Policy:
    POLICIES[new.name] = new
    return new


def policy(
    name: str, help: str, *, reason: str = "", slices_alone: bool = False, **more: Any
) -> Callable[[Propose], Policy]:
    """Make a policy of a function, and register it. reason: why the device stays empty where the function yields
    nothing that uses it. slices_alone: it may leave llama.cpp on the CPU, and put nothing but slices on the device.
    more: further fields of a Policy."""
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
    """The best of what `propose` yields: the fastest; of OATO as published the one that uses the device best.

    What llama.cpp takes beside operators is only known from a no_alloc load. So the fastest proposal is verified by
    one, and its budget is then proposed for again: with less of it where the placement does not fit, with more where it
    leaves some. Where nothing is better on the device, everything is on the CPU, for the workload as it was asked for.
    """
    budgets, notes = budgets_of(problem, request, slices_alone)
    if not budgets:
        return replace(on_cpu(problem, request.workload, request.phase), notes=notes)
    capacity, corrected = budgets[0].memory.capacity, [CorrectedBudget(budget.memory) for budget in budgets]
    proposed: dict[int, Placement] = {}  # by budget
    best: VerifiedPlan | None = None
    last: VerifiedPlan | None = None
    open_budgets = list(range(len(budgets)))

    def key(decision: VerifiedPlan) -> float:
        return decision.memory.spare if request.rules.affinity == "paper" else decision.placement.seconds

    for _ in range(ROUNDS):
        for i in open_budgets:
            to_beat_s = min((proposal.seconds for proposal in proposed.values()), default=inf)
            budget = replace(budgets[i], memory=corrected[i].memory, to_beat_s=to_beat_s)
            least_s = inf  # what takes that, the device cannot compute all of
            for placement in propose(problem, budget):
                if placement.seconds < least_s:
                    least_s, proposed[i], budgets[i] = placement.seconds, placement, replace(budgets[i], last=placement)
        i = min(proposed, key=lambda i: proposed[i].seconds, default=-1)
        if i < 0 or not proposed[i].uses_device(problem.graph.n_layer):
            last = None
            break
        placement, budget = proposed.pop(i), budgets[i]
        workload = replace(budget.workload, n_ubatch=placement.n_ubatch or budget.workload.n_ubatch)
        last = verify(problem, name, workload, placement, budget.notes, capacity)
        if last.memory.spare >= 0 and (best is None or key(last) < key(best)):
            best = last
            proposed = {i: placement for i, placement in proposed.items() if placement.seconds < last.placement.seconds}
        learned = corrected[i].learn(last.placement.first_device_layer, own_bytes(problem, last.placement), last.memory)
        open_budgets = [i] if learned else []
    if best is not None:
        return best
    if last is not None and request.required:
        real = last.memory
        raise DoesNotFit(real.limit - real.spare, real.limit, problem.profile.device, f"the {name} placement")
    why = reason if last is None else "no placement that was tried fits"
    return nothing_placed(problem, name, request.workload, request.phase, capacity, why)


def budgets_of(
    problem: Problem, request: Request, slices_alone: bool = False
) -> tuple[list[MemoryBudget], tuple[str, ...]]:
    """The budgets to make proposals for: beside llama.cpp on the device, and for slices alone; and notes on what was
    lowered, or why no budget is left."""
    streaming = StreamSettings(prefetch=request.rules.prefetch)
    slicer = cache(lambda workload, **may: Slicer(problem, workload, pricing_of(problem, streaming), **may))
    budgets: list[MemoryBudget] = []
    memory, workload, notes = device_memory(problem, request.workload, request.required and not slices_alone)
    if memory is not None:
        budgets.append(
            MemoryBudget(request, workload, costs_of(problem, workload, request.phase), memory, slicer, notes=notes)
        )
    if slices_alone:
        memory = DeviceMemory(
            capacity_of(problem, request.workload), problem.vram_fill, 0, 0, 0, problem.graph.n_layer,
            operators_limit(problem), problem.runtime_bytes(request.workload),
        )  # fmt: skip
        costs = costs_of(problem, request.workload, request.phase, llama_uses_device=False)
        budgets.append(MemoryBudget(request, request.workload, costs, memory, slicer, has_llama=False))
    return budgets, notes
