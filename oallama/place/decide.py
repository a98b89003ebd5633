"""From a policy's name to a verified placement: what it looks at, and which of several is taken.

Pure but for the problem's probe, which answers what a placement puts on the device (a no_alloc load).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.routing import Routing
from oallama.core.types import CPU_DEVICE, Operator, Phase, PrefetchMode, StreamSettings, Workload
from oallama.cost.experts import expert_use
from oallama.cost.placement import Costs
from oallama.place.affinity import FillRule
from oallama.place.budget import DeviceMemory
from oallama.place.exchange import exchange
from oallama.place.microbatch import seconds_in, seconds_recut, with_larger_ubatch
from oallama.place.oato import AffinityRule, search
from oallama.place.placed import Placed, layers
from oallama.place.problem import (
    Decision,
    Problem,
    costs_of,
    device_memory,
    nothing_placed,
    on_cpu,
)
from oallama.place.published import PUBLISHED, Propose, published, published_notes
from oallama.place.sliced import EXPERTS, QUICK, SLICED, THOROUGH, Effort, Sliced
from oallama.place.verify import Proposal, verified, verified_in_rounds

CANDIDATES = ("oato", "scheinfer", "split", "layers", "cpu")
"""What "auto" chooses among, and what the gate measures."""

FIT = "fit"
"""llama.cpp's own --fit, which only llama.cpp can answer (bench/fit_plan.py)."""

POLICIES = ("auto", *CANDIDATES, EXPERTS, *PUBLISHED)

QUICK_MISSES = 0.05
"""Of the seconds: by so much a quick look's placement may be slower than the thorough one's."""


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
                raise UsageError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(get_args(known))}")

    @property
    def are_oatos(self) -> bool:
        """Whether some were chosen that only OATO has."""
        return (self.affinity, self.fill) != ("default", "continue")


def decide(
    problem: Problem,
    policy: str,
    load: Workload,
    phase: Phase,
    rules: Rules = Rules(),
    effort: Effort = THOROUGH,
    larger_ubatches: Sequence[int] = (),
) -> Decision:
    """The placement of a policy for a workload; "auto" takes the one with the least predicted time. larger_ubatches:
    micro-batches above the workload's that may be taken instead.

    "auto" with an affinity or a fill of the caller's choice is OATO, which they are for.

    Raises UsageError for a policy that there is not, that knows no affinity and fill where these are chosen, or that
    needs to know which experts are used where that is not known; DoesNotFit where the policy needs the device and not
    even KV and compute buffers of one layer fit.
    """
    if policy == FIT:
        raise UsageError("policy fit is llama.cpp's own choice; ask it with bench.fit_plan.fit_plan, or `oallama plan`")
    if policy not in POLICIES:
        raise UsageError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if rules.are_oatos:
        if policy not in ("auto", "oato"):
            raise UsageError(f"affinity and fill say how oato places; policy {policy} does not use them")
        policy = "oato"
    if policy == EXPERTS and (fault := hot_fault(problem.operators, problem.routing)):
        raise UsageError(fault)
    if policy == "cpu" or problem.profile.device == CPU_DEVICE:
        return on_cpu(problem, load, phase)

    def one(name: str, load: Workload, effort: Effort = effort) -> Decision:
        if name == "cpu":
            return on_cpu(problem, load, phase)
        if name in SLICED:
            made = Sliced(problem, load, phase, name, rules.prefetch, effort).decide()
            if name == EXPERTS and not _has_hot(made):  # then the search without them finds better slices
                slices = replace(one("scheinfer", load, effort), policy=EXPERTS)
                made = min(made, slices, key=lambda decision: decision.placed.seconds)
            return made
        if name in PUBLISHED:
            return _decide_published(problem, name, load, phase, StreamSettings(prefetch=rules.prefetch))
        return _decide_whole(problem, name, load, phase, rules, effort.exchanges, required=policy != "auto")

    n_layer = problem.graph.n_layer
    policies: Sequence[str] = (policy,)
    if policy == "auto":
        most = "scheinfer" if hot_fault(problem.operators, problem.routing) else EXPERTS  # that has the most choices
        policies = ("cpu", most) if problem.slices_only else ("oato", "layers", "cpu", most)
    found = {name: one(name, load) for name in policies}

    def promised(name: str, n_ubatch: int) -> float:
        """Infinite for other systems' policies, where the memory was short already, and where nothing is streamed as
        nothing is on the device."""
        decision = found[name]
        if name in PUBLISHED or decision.workload != load or not decision.placed.uses_device(n_layer):
            return float("inf")
        return seconds_in(problem, decision, n_ubatch, phase)

    def searched(name: str, n_ubatch: int, to_beat: float) -> Decision | None:
        """Quickly first, as often there is not the memory for what was promised: anew, or beside the same whole
        operators with what is sliced cut as finely as ever."""
        larger = replace(load, n_ubatch=n_ubatch)

        def within(at_most: float, look: Effort) -> Decision | None:
            try:
                made = one(name, larger, replace(look, lowers_ubatch=False))
            except DoesNotFit:
                return None
            fits = made.workload == larger and made.placed.uses_device(n_layer)
            return made if fits and made.placed.seconds < at_most else None

        hope_s = to_beat * (1 + QUICK_MISSES)
        if within(hope_s, QUICK) is None and seconds_recut(problem, found[name], n_ubatch, phase) >= hope_s:
            return None
        return within(to_beat, effort)

    best = with_larger_ubatch(found, larger_ubatches, promised, searched)
    slices = best.placed.slices
    if best.policy == EXPERTS and not _has_hot(best):
        if policy == EXPERTS:
            return replace(best, notes=(*best.notes, "no layer's experts are worth placing by use"))
        best = replace(best, policy="scheinfer")
    if policy == "auto" and best.policy == "scheinfer" and slices is not None and not slices.streams:
        return replace(best, policy="split")
    return best


def _has_hot(decision: Decision) -> bool:
    return decision.placed.slices is not None and decision.placed.slices.hot_bytes > 0


def decide_as_given(problem: Problem, placed: Placed, load: Workload, policy: str) -> Decision:
    """A placement of the caller's own, priced for the workload and probed but not changed: `spare` may be negative."""
    return verified(problem, policy, Proposal(load, costs_of(problem, load, "mixed"), placed))


#
# whole operators
#


def _decide_whole(
    problem: Problem,
    policy: str,
    asked: Workload,
    phase: Phase,
    rules: Rules,
    exchanges: bool,
    required: bool,
) -> Decision:
    """A placement of whole operators: `oato`, or `layers`."""

    def propose(_load: Workload, costs: Costs, memory: DeviceMemory) -> Placed:
        if policy == "layers":
            return layers(costs, memory.operator_room)
        placed = search(costs, problem.operators, memory.operator_room, affinity=rules.affinity, rule=rules.fill)
        if exchanges and not rules.are_oatos:
            placed = exchange(costs, problem.operators, memory.operator_room, placed)
        return placed

    nothing = f"with crossings counted, no operator is predicted to be faster on {problem.profile.device}"
    reason = "no layer fits the device" if policy == "layers" else f"{nothing} (--fill full uses it anyway)"
    return _corrected(problem, policy, asked, phase, propose, reason, required, fullest=rules.affinity == "paper")


def _decide_published(
    problem: Problem, policy: str, load: Workload, phase: Phase, streaming: StreamSettings
) -> Decision:
    """A policy of another system, and what of that is not there."""
    propose = published(problem, policy, phase, streaming)
    decision = _corrected(problem, policy, load, phase, propose, f"{policy} finds nothing that fits it", required=True)
    return replace(decision, notes=(*decision.notes, *published_notes(problem, policy, decision.placed)))


def _corrected(
    problem: Problem,
    policy: str,
    asked: Workload,
    phase: Phase,
    propose: Propose,
    reason: str,
    required: bool,
    fullest: bool = False,
) -> Decision:
    """The best that `propose` finds in rounds of verification (place/verify.py). A placement that leaves the device
    empty is for the workload as it was asked for.

    reason: why that is so. required: raise DoesNotFit where nothing that was tried fits, else leave everything on the
    CPU and say so. fullest: of placements that fit the one that uses the device best is kept, not the fastest.
    """
    memory, load, notes = device_memory(problem, asked, required)
    if memory is None:
        return replace(on_cpu(problem, asked, phase), notes=notes)
    costs = costs_of(problem, load, phase)

    def proposed(room: DeviceMemory) -> Proposal | None:
        placed = propose(load, costs, room)
        return Proposal(load, costs, placed, notes) if placed.uses_device(problem.graph.n_layer) else None

    def key(decision: Decision) -> float:
        return decision.memory.spare if fullest else decision.placed.seconds

    best, last = verified_in_rounds(problem, policy, memory, proposed, key)
    if best is not None:
        return best
    if last is not None and required:
        real = last.memory
        raise DoesNotFit(real.limit - real.spare, real.limit, problem.profile.device, f"the {policy} placement")
    why = reason if last is None else "no placement that was tried fits it"
    return nothing_placed(problem, policy, asked, phase, memory.capacity, why)


#
# hot experts
#


def hot_fault(operators: Sequence[Operator], routing: Routing | None) -> str:
    """Why no experts can be placed by use; "" where some can."""
    if all(operator.op != "MUL_MAT_ID" for operator in operators):
        return f"policy {EXPERTS} is for models with experts, and this one has none; use scheinfer"
    count = "count them with `oallama profile MODEL --routing`, with --prompts FILE for traffic like yours"
    if routing is None:
        return f"policy {EXPERTS} places experts by how often they are used, which is not known of this model; {count}"
    if not expert_use(routing):
        return (
            f"policy {EXPERTS} believes uses only that were seen again later, and of this model's nothing was recorded "
            f"twice; {count}, or count anew with --refresh"
        )
    return ""
