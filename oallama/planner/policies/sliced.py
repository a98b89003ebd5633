"""The `split`, `scheinfer` and `experts` policies: OATO places whole operators in a part of the memory, slices take the
rest. They are one search with two switches: `streams`, for blocks cut three ways and n_g (`scheinfer`), and `hot`, for
the most used experts of a layer instead of a slice through all of them (`experts`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import inf

from oallama.core.errors import UsageError
from oallama.core.types import Operator, Workload
from oallama.cost.blocks import is_ffn
from oallama.cost.experts import expert_use
from oallama.cost.whole import Costs
from oallama.planner.placement import OperatorBudget, Placement, VerifiedPlan, all_on_cpu, placed_whole, whole_bytes
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import SMALLEST_UBATCH, Problem, costs_of
from oallama.planner.slicer import N_VALUES, Slicing, experts_may_follow
from oallama.planner.transfers import Transfers
from oallama.planner.whole import search, swap_operators

Sides = tuple[tuple[bool, ...], int]
"""(which operators are on the device, first_device_layer)."""

EXPERTS = "experts"
"""The policy scheinfer with hot experts."""

SHARES, QUICK_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125), (1.0, 0.5)
"""Shares of the budget that OATO may fill with whole operators."""

SHARE_STEP = 0.125
"""Distance from the best of SHARES to two more shares that are tried: without them one of 129 plans of the corpus is
2.1 % slower. Trying half a step further changes no plan by 1 %."""

COARSE_VALUES = 4
"""Number of values of r_GG while placements are compared. Those near the best (_near) are then cut with N_VALUES:
without that eight of 29 plans are slower, by up to 36 %."""

N_SLOTS = (2, 1)
"""Numbers of slots of the ring to try. With two, a block is copied while another is computed; one slot leaves memory
for weights: without it three of 29 plans are slower, by up to 10.5 %."""

MUCH_STAGING = 0.1
"""Share of the budget. If staging takes more, a smaller ring or micro-batch is tried: without a smaller micro-batch one
of 214 plans is 4.4 % slower."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A placement of whole operators, with the cuts of the other operators."""

    workload: Workload  # its micro-batch may be lowered
    whole: Placement
    budget: tuple[int, int]  # bytes of the device: for slices and their staging, and for slices alone
    seconds: float  # of the phase, with the cuts
    n_slots: int  # of the ring
    slicing: Slicing | None = None  # None: no cuts
    budget_limited: bool = False  # more device memory would change the cuts


class SliceSearch:
    """The search for slices: OATO places whole operators in a share of the device's memory, and slices take the rest.

    A slice needs no KV, no compute buffers and no layers of llama.cpp on the device. So OATO fills smaller and smaller
    shares of the memory; near the best share two more are tried. OATO's own placement is one of the trials.
    Without llama.cpp on the device all memory goes to slices.
    """

    def __init__(self, problem: Problem, inputs: PolicyInputs, streams: bool, hot: bool) -> None:
        """streams: whether weights may be streamed; hot: whether the device may have the most used experts."""
        self._problem, self._inputs, self._quick = problem, inputs, inputs.request.quick
        self._fine_values = COARSE_VALUES if self._quick else N_VALUES
        self._slicer = cache(inputs.slicer(inputs.request.workload, streams=streams, hot=hot).with_workload_and_slots)
        ahead = streams and inputs.request.rules.prefetch == "ahead" and not problem.profile.is_blocking
        self._n_slots = N_SLOTS if ahead else (1,)  # a second slot gains only if copies run ahead

    def best(self) -> Iterator[Placement]:
        """Yield the placement with the least predicted time in the budget, if anything fits it."""
        trials: list[Trial] = []
        for trial in self._trials_on_device(trials) if self._inputs.llama_uses_device else self._trials_on_cpu(trials):
            trials.append(self._cut(trial, COARSE_VALUES))
            for n_slots in self._n_slots[1:] if self._inputs.llama_uses_device and _is_short(trials[-1]) else ():
                other_ring = self._cut(trials[-1], COARSE_VALUES, n_slots)
                trials[-1] = min(trials[-1], other_ring, key=_seconds)
        if not trials:
            return
        best = min(trials, key=_seconds)
        if best.seconds <= self._near(self._inputs.to_beat_s):
            near_s, fine = self._near(best.seconds), list[Trial]()
            for trial in {trial.whole: trial for trial in trials if trial.seconds <= near_s}.values():
                fine.append(self._cut(trial, self._fine_values))
            finest = min(fine, key=_seconds)
            for n_slots in set(self._n_slots) - {finest.n_slots}:
                fine.append(self._cut(finest, self._fine_values, n_slots))
            best = min(best, *fine, key=_seconds)
        slicing = best.slicing
        if slicing is None:
            yield best.whole
            return
        slicer = self._slicer(best.workload, best.n_slots)
        if slicing.token_assignment:
            slicing = slicer.with_table(slicing, best.budget[0])
        placement, notes = slicer.placed(best.whole, slicing, self._inputs.request.phase), hot_notes(slicing)
        requested, n_ubatch = self._inputs.workload.n_ubatch, best.workload.n_ubatch
        if n_ubatch != requested:
            change = f"lowered from {requested} to {n_ubatch} tokens"
            notes = (f"micro-batch {change} to leave room for slices", *notes)
        yield replace(placement, notes=notes, n_ubatch=n_ubatch)

    def _trials_on_cpu(self, trials: list[Trial]) -> Iterator[Trial]:
        """Yield trials with llama.cpp on the CPU alone; the caller cuts each and appends it to `trials`. While memory
        is short, tries smaller micro-batches, which leave more memory for weights."""
        costs, workload, least_s = self._inputs.costs, self._inputs.workload, inf
        trials.append(self._trial(workload, all_on_cpu(costs)))
        while True:
            yield self._trial(workload, all_on_cpu(costs))
            trial = trials[-1]
            if trial.slicing is None:
                trials.pop()
            elif trial.seconds > least_s:
                return  # halving again would free half as much memory and add twice as many passes
            else:
                least_s = trial.seconds
            hindered = trial.budget_limited and (
                trial.slicing is None or trial.slicing.staging_bytes > MUCH_STAGING * trial.budget[0]
            )
            if not hindered or self._quick or workload.n_ubatch // 2 < SMALLEST_UBATCH:
                return
            workload = replace(workload, n_ubatch=workload.n_ubatch // 2)
            costs = costs_of(self._problem, workload, self._inputs.request.phase, llama_uses_device=False)

    def _trials_on_device(self, trials: list[Trial]) -> Iterator[Trial]:
        """Yield trials with llama.cpp on the device; the caller cuts each and appends it to `trials`: OATO's placements
        in shares of the budget, and attention whole."""
        inputs, costs, operators = self._inputs, self._inputs.costs, self._problem.operators
        trial_of: dict[Sides, Trial] = {}
        transfers, by_share = Transfers(costs), dict[float, Trial]()

        def look(whole: Placement) -> Generator[Trial, None, Trial]:
            sides = whole.on_device, whole.first_device_layer
            if sides not in trial_of:
                yield self._trial(inputs.workload, whole)
                trial_of[sides] = trials[-1]
            return trial_of[sides]

        def filled(share: float) -> Placement:
            """OATO's placement in a share of the budget."""
            first_layers = (0,) if self._quick else None
            return search(costs, self._budget(share), first_layers=first_layers, transfers=transfers)

        def best_share() -> float:
            return min(by_share, key=lambda share: by_share[share].seconds)

        for share in QUICK_SHARES if self._quick else SHARES:
            placement = filled(share)
            if not placement.llama_uses_device(self._problem.graph.n_layer):
                break  # norms and KV do not fit
            by_share[share] = yield from look(placement)
        if by_share and not self._quick:
            middle = best_share()
            for share in (middle - SHARE_STEP, middle + SHARE_STEP):
                if 0 < share <= 1:
                    by_share[share] = yield from look(filled(share))
            for share in {1.0, best_share()}:  # the whole budget, as in policy `oato`
                yield from look(swap_operators(costs, operators, self._budget(share), by_share[share].whole))
        trials[:0] = [_uncut(trial) for trial in trials]
        placement = attention(costs, operators)
        if whole_bytes(operators, placement.on_device) <= inputs.operator_bytes(0):
            yield from look(placement)
        if inputs.allows_slices_only:
            yield from look(placed_whole(costs, (False,) * len(operators), self._problem.graph.n_layer))

    def _budget(self, share: float) -> OperatorBudget:
        def budget(first_device_layer: int) -> int:
            n_bytes = self._inputs.operator_bytes(first_device_layer)
            return int(share * n_bytes) if n_bytes > 0 else n_bytes

        return budget

    def _near(self, seconds: float) -> float:
        """Seconds up to which a coarsely cut trial may still be the best: one block's share above `seconds`."""
        return seconds * (1 + 1 / max(1, sum(self._problem.splittable)))

    def _trial(self, workload: Workload, whole: Placement) -> Trial:
        used = whole_bytes(self._problem.operators, whole.on_device)
        budget = self._inputs.cut_bytes(whole.first_device_layer, used)
        return Trial(workload, whole, budget, whole.seconds, self._n_slots[0])

    def _cut(self, trial: Trial, n_values: int, n_slots: int | None = None) -> Trial:
        """The trial with new cuts. n_slots: of the ring; None: the trial's."""
        n_slots = n_slots or trial.n_slots
        slicing = self._slicer(trial.workload, n_slots).solve(trial.whole, *trial.budget, n_values)
        trial = replace(_uncut(trial), n_slots=n_slots, budget_limited=slicing.budget_limited)
        if slicing.is_empty:
            return trial
        return replace(
            trial, slicing=slicing, seconds=slicing.predicted(trial.workload).over(self._inputs.request.phase)
        )


def _seconds(trial: Trial) -> float:
    return trial.seconds


def _is_short(trial: Trial) -> bool:
    """Whether a smaller ring may leave the device's memory to better cuts."""
    slicing = trial.slicing
    return trial.budget_limited and (
        slicing is None or not slicing.streams or slicing.staging_bytes > MUCH_STAGING * trial.budget[0]
    )


def _uncut(trial: Trial) -> Trial:
    return replace(trial, slicing=None, seconds=trial.whole.seconds)


def attention(costs: Costs, operators: Sequence[Operator]) -> Placement:
    """Place attention of all layers whole on the device, with all norms and KV, ignoring memory. FFNs that are then
    sliced live on the device too (cost/blocks.py, residents), so one block per layer is joined. Without this placement
    three of 29 plans are slower, by up to 4.1 %; attention of the last half of the layers changes none of 78 by 1 %."""
    pairs = zip(operators, costs.operators, strict=True)
    return placed_whole(costs, [o.layer is not None and c.t_gpu_s is not None and not is_ffn(o) for o, c in pairs], 0)


def hot_notes(slicing: Slicing) -> tuple[str, ...]:
    """A note with the number of hot experts and their expected hit rates."""
    hot = [(block_type, cut) for block_type, cut in slicing.cut_blocks if cut.n_hot]
    if not hot:
        return ()
    n_hot, n_all = sum(cut.n_hot for _, cut in hot), sum(block_type.n_expert for block_type, _ in hot)
    decode, prompt = (
        sum(getattr(block_type.use, phase)[cut.n_hot] for block_type, cut in hot if block_type.use is not None)
        / len(hot)
        for phase in ("decode", "prompt")
    )
    where, rates = f"in {len(hot)} layers are on the GPU", f"{decode:.0%} in decode and {prompt:.0%} in prompts"
    if slicing.exchanges:
        return (f"{n_hot} of {n_all} experts {where} and follow the conversation; recorded hit rate {rates}",)
    return (f"{n_hot} of {n_all} hot experts {where}; hit rate on later traffic {rates}",)


#
# the policies
#


def _simplest(verified: VerifiedPlan, is_auto: bool) -> VerifiedPlan:
    """Name a plan of `auto` after the simplest policy that could have made it."""
    placement = verified.placement
    if not is_auto or placement.first_slices.hot_bytes:
        return verified
    return replace(verified, policy="split" if placement.is_sliced and not placement.streams else "scheinfer")


def _with_hot(verified: VerifiedPlan, is_auto: bool) -> VerifiedPlan:
    if is_auto or verified.placement.first_slices.hot_bytes:
        return _simplest(verified, is_auto)
    return replace(verified, notes=(*verified.notes, "placing experts by use gains nothing in any layer"))


def hot_fault(problem: Problem) -> str:
    """Why policy experts cannot be used; "" if it can."""
    routing = problem.routing
    if all(not operator.routed for operator in problem.operators):
        return f"policy {EXPERTS} needs a model with experts; use scheinfer"
    if experts_may_follow(problem):
        return ""
    count = "count them with `oallama run MODEL --count-experts` over prompts like yours"
    if routing is None:
        return f"policy {EXPERTS} needs expert counts, which this model lacks; {count}"
    if not expert_use(routing):
        return f"policy {EXPERTS} needs expert counts from several recordings, which this model lacks; {count}"
    return ""


NO_GAIN = "no whole or split operator is predicted to be faster there"


@policy(
    "scheinfer",
    "also weights streamed to the device",
    streams=True,
    slices_alone=True,
    reason=NO_GAIN,
    finish=_simplest,
)
def scheinfer(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    return SliceSearch(problem, inputs, streams=True, hot=False).best()


@policy("split", "also operators split between CPU and device", slices_alone=True, reason=NO_GAIN)
def split(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    return SliceSearch(problem, inputs, streams=False, hot=False).best()


@policy(
    EXPERTS, "also the most used experts on the device", streams=True, slices_alone=True, reason=NO_GAIN,
    finish=_with_hot,
)  # fmt: skip
def experts(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    if fault := hot_fault(problem):
        raise UsageError(fault)
    return most_choices(problem, inputs)


def most_choices(problem: Problem, inputs: PolicyInputs) -> Iterator[Placement]:
    """Propose with hot experts if the model may have them, and as scheinfer, which finds better slices: the policy with
    the most options."""
    modes = (False,) if hot_fault(problem) else (True, False)
    return chain.from_iterable(SliceSearch(problem, inputs, streams=True, hot=hot).best() for hot in modes)
