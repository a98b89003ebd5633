"""The `split`, `scheinfer` and `experts` policies: OATO decides what lies whole on the device, slices take what it
leaves. They are one search with two switches: whether weights may be streamed, so that blocks are cut three ways and
the device computes some of a prompt's tokens (`scheinfer`), and whether the device may have the most used experts of a
layer instead of a slice through all of them (`experts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from oallama.core.errors import UsageError
from oallama.core.types import Operator, Workload
from oallama.cost.blocks import is_ffn
from oallama.cost.experts import expert_use
from oallama.cost.whole import Costs
from oallama.place.placement import Budget, Candidate, Placement, cpu, placed_whole, whole_bytes
from oallama.place.policies.registry import Room, policy
from oallama.place.problem import SMALLEST_UBATCH, Problem, costs_of
from oallama.place.sharing import N_VALUES, SlicePlan, may_follow
from oallama.place.transfers import Transfers
from oallama.place.whole import exchange, search

Sides = tuple[tuple[bool, ...], int]
"""Which operators are on the device, and from which layer on norms and KV are."""

EXPERTS = "experts"
"""Policy scheinfer with hot sets of experts, for models whose routing is known."""

SHARES, QUICK_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125), (1.0, 0.5)
"""Shares of the room for whole operators that OATO may fill."""

SHARE_STEP = 0.125
"""From the best share of these to the ones beside it, which are looked at too: without them one plan of the corpus' 129
is 2.1 % slower. Half a step more from there moves no plan by 1 %."""

COARSE_VALUES = 4
"""Values of r_GG while placements are compared. Those within a block's share of the best are cut finely: with these
values alone eight of 29 plans are slower, by up to 36 %."""

N_SLOTS = (2, 1)
"""Slots of the ring. With two, a block is copied while another is computed; one leaves the memory to weights: without
it three of 29 plans are slower, by up to 10.5 %."""

MUCH_STAGING = 0.1
"""Share of the device's memory. Where staging takes more, a smaller micro-batch may gain more room than it costs:
without one a plan of 214 is 4.4 % slower."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Whole operators, and the cuts of what these leave on the host."""

    workload: Workload  # its micro-batch may be lowered
    whole: Placement
    room: tuple[int, int]  # bytes of the device: for cuts and their staging, and for cuts alone
    seconds: float  # of the phase, cuts included
    n_slots: int = N_SLOTS[0]  # of the ring that cuts are streamed through
    plan: SlicePlan | None = None  # None: nothing is cut
    short: bool = False  # with more of the device's memory there would be other cuts


class SliceSearch:
    """OATO decides what lies whole on the device; what is left on the host is sliced.

    A slice needs nothing of llama.cpp on the device: no KV, no compute buffers, no layers. So OATO is asked for less
    and less of the device's memory, and what it leaves goes to slices; around the best share it is asked whether a
    little more or less would buy more as slices. OATO's own placement is among the trials. In the room without
    llama.cpp on the device all of it goes to slices.
    """

    def __init__(self, problem: Problem, room: Room, streams: bool, hot: bool) -> None:
        """streams: whether weights may be streamed; hot: whether the device may have the most used experts."""
        self._problem, self._room, self._hot, self._quick = problem, room, hot, room.asked.quick
        self._fine_values = COARSE_VALUES if self._quick else N_VALUES
        self._slicer = cache(room.slicer(room.asked.workload, streams=streams, hot=hot).varied)
        ahead = streams and room.asked.rules.prefetch == "ahead" and not problem.profile.is_blocking
        self._n_slots = N_SLOTS if ahead else (1,)  # where nothing is copied ahead, more gain nothing

    def best(self) -> Iterator[Placement]:
        """Yield the placement with the least predicted time in the room, if anything fits it."""
        found = self._beside() if self._room.has_llama else list(self._alone())
        if not found:
            return
        best = min(found, key=_seconds)
        if best.seconds <= self._near(self._room.to_beat_s):
            near_s = self._near(best.seconds)
            near = {one.whole: one for one in found if one.seconds <= near_s}
            best = min(best, self._finely(list(near.values())), key=_seconds)
        plan = best.plan
        if plan is None:
            yield best.whole
            return
        slicer = self._slicer(best.workload, best.n_slots)
        if plan.token_assignment:
            plan = slicer.with_table(plan, best.room[0])
        placed, notes = slicer.placed(best.whole, plan, self._room.asked.phase), best.whole.notes
        asked, n_ubatch = self._room.workload.n_ubatch, best.workload.n_ubatch
        if n_ubatch != asked:
            change = f"lowered from {asked} to {n_ubatch} tokens"
            notes = (*notes, f"micro-batch {change} to leave room for slices")
        yield replace(placed, notes=(*notes, *hot_notes(plan)), n_ubatch=n_ubatch)

    def _alone(self) -> Iterator[Trial]:
        """llama.cpp on the CPU alone, without slices and with them. While memory is short, smaller micro-batches are
        tried: they leave more of it for weights."""
        costs, asked, least_s = self._room.costs, self._room.workload, inf
        workload = asked
        while True:
            made = self._cut(self._trial(workload, cpu(costs)), COARSE_VALUES)
            if workload == asked:
                yield _uncut(made)
            if made.plan is not None:
                yield made
            hindered = made.short and (made.plan is None or made.plan.staging_bytes > MUCH_STAGING * made.room[0])
            if not hindered or self._quick or workload.n_ubatch // 2 < SMALLEST_UBATCH:
                return
            if made.plan is not None:
                if made.seconds > least_s:
                    return  # to halve it again frees half as much memory, and adds twice as many passes
                least_s = made.seconds
            workload = replace(workload, n_ubatch=workload.n_ubatch // 2)
            costs = costs_of(self._problem, workload, self._room.asked.phase, llama_uses_device=False)

    def _beside(self) -> list[Trial]:
        """OATO's placements in shares of the room, and attention whole, with slices in what they leave; and without
        any. Once a placement for this room was verified, only its share and the whole are looked at."""
        room, costs, operators = self._room, self._room.costs, self._problem.operators
        looked: dict[Sides, Trial] = {}
        transfers, found = Transfers(costs), dict[float, Trial]()

        def look(whole: Placement) -> Trial:
            sides = whole.on_device, whole.first_device_layer
            if sides not in looked:
                made = self._cut(self._trial(room.workload, whole), COARSE_VALUES)
                plan = made.plan
                if made.short and (
                    plan is None or not plan.streams or plan.staging_bytes > MUCH_STAGING * made.room[0]
                ):
                    made = min([made, *(self._cut(made, COARSE_VALUES, n) for n in self._n_slots[1:])], key=_seconds)
                looked[sides] = made
            return looked[sides]

        def filled(share: float) -> Placement:
            """OATO's placement in a share of the room."""
            first_layers = (0,) if self._quick else None
            return search(costs, self._budget(share), first_layers=first_layers, transfers=transfers)

        def best_share() -> float:
            return min(found, key=lambda share: found[share].seconds)

        for share in self._shares():
            placed = filled(share)
            if not placed.llama_uses_device(self._problem.graph.n_layer):
                break  # norms and KV have no room there
            found[share] = look(placed)
        if found and not self._quick:
            middle = best_share()
            for share in (middle - SHARE_STEP, middle + SHARE_STEP) if room.last is None else ():
                if 0 < share <= 1:
                    found[share] = look(filled(share))
            for share in {1.0, best_share()}:  # all of the room: as `oato` has it
                look(exchange(costs, operators, self._budget(share), found[share].whole))
        whole = [_uncut(one) for one in looked.values()]
        placed = attention(costs, operators)
        if whole_bytes(operators, placed.on_device) <= room.operator_bytes(0):
            look(placed)
        return [*whole, *looked.values()]

    def _shares(self) -> Sequence[float]:
        """Shares of the room that OATO may fill, the whole first."""
        last = self._room.last
        if last is None:
            return QUICK_SHARES if self._quick else SHARES
        used = whole_bytes(self._problem.operators, last.on_device)
        return 1.0, min(1.0, used / max(1, self._room.operator_bytes(last.first_device_layer)))

    def _budget(self, share: float) -> Budget:
        def budget(first_device_layer: int) -> int:
            room = self._room.operator_bytes(first_device_layer)
            return int(share * room) if room > 0 else room

        return budget

    def _near(self, seconds: float) -> float:
        """Within a block's share of it a trial that was cut coarsely may be the best one."""
        return seconds * (1 + 1 / max(1, sum(self._problem.splittable)))

    def _finely(self, trials: Sequence[Trial]) -> Trial:
        """The best of these, cut finely; with another number of slots where that is better."""
        best = min((self._cut(one, self._fine_values, one.n_slots) for one in trials), key=_seconds)
        others = (self._cut(best, self._fine_values, n) for n in self._n_slots if n != best.n_slots)
        return min([best, *others], key=_seconds)

    def _trial(self, workload: Workload, whole: Placement) -> Trial:
        used = whole_bytes(self._problem.operators, whole.on_device)
        return Trial(workload, whole, self._room.cut_bytes(whole.first_device_layer, used), whole.seconds)

    def _cut(self, trial: Trial, n_values: int, n_slots: int | None = None) -> Trial:
        """Cut what the trial leaves on the host anew, in its room, with a ring of so many slots; None: of the most."""
        n_slots = n_slots or self._n_slots[0]
        plan = self._slicer(trial.workload, n_slots).plan(trial.whole, *trial.room, n_values)
        trial = replace(_uncut(trial), n_slots=n_slots, short=plan is not None and plan.short)
        if plan is None or plan.is_empty:
            return trial
        return replace(trial, plan=plan, seconds=plan.predicted(trial.workload).over(self._room.asked.phase))


def _seconds(trial: Trial) -> float:
    return trial.seconds


def _uncut(trial: Trial) -> Trial:
    return replace(trial, plan=None, seconds=trial.whole.seconds)


def attention(costs: Costs, operators: Sequence[Operator]) -> Placement:
    """Place all but FFNs whole on the device, all norms and KV with it, whatever memory that takes. FFNs that are then
    sliced live there too (cost/blocks.py, residents): one block a layer is left to join. Without this placement three
    of 29 plans are slower, by up to 4.1 %; attention of the last half of the layers moves none of 78 by 1 %."""
    pairs = zip(operators, costs.operators, strict=True)
    return placed_whole(costs, [o.layer is not None and c.t_gpu_s is not None and not is_ffn(o) for o, c in pairs], 0)


def hot_notes(plan: SlicePlan) -> tuple[str, ...]:
    """How much of the traffic the hot experts are expected to serve."""
    hot = [(cost, cut) for cost, cut in plan.layers if cut.n_hot]
    if not hot:
        return ()
    n_hot, n_all = sum(cut.n_hot for _, cut in hot), sum(cost.n_expert for cost, _ in hot)
    decode, prompt = (
        sum(cost.use.coverage(cut.n_hot, n) for cost, cut in hot if cost.use is not None) / len(hot) for n in (1, 2)
    )
    if plan.exchanges:
        return (
            f"{n_hot} of {n_all} experts in {len(hot)} layers are on the GPU and follow the conversation; recorded "
            f"hit rate {decode:.0%} in decode and {prompt:.0%} in prompts",
        )
    return (
        f"{n_hot} of {n_all} hot experts in {len(hot)} layers are on the GPU; hit rate on later traffic "
        f"{decode:.0%} in decode and {prompt:.0%} in prompts",
    )


#
# the policies
#


def has_hot(decision: Candidate) -> bool:
    return decision.placement.hot_bytes > 0


def hot_fault(problem: Problem) -> str:
    """Why no experts can be placed by use; "" if some can."""
    routing = problem.routing
    if all(operator.op != "MUL_MAT_ID" for operator in problem.operators):
        return f"policy {EXPERTS} needs a model with experts; use scheinfer"
    if may_follow(problem):
        return ""
    count = "count them with `oallama run MODEL --count-experts` over prompts like yours"
    if routing is None:
        return f"policy {EXPERTS} needs expert counts, which this model lacks; {count}"
    if not expert_use(routing):
        return (
            f"policy {EXPERTS} needs expert counts from more than one recording, which this model lacks; "
            f"{count}, or count again with --refresh"
        )
    return ""


NOTHING = "no whole or split operator is predicted to be faster there"


@policy("scheinfer", "also weights streamed to the device", streams=True, slices_alone=True, reason=NOTHING)
def scheinfer(problem: Problem, room: Room) -> Iterable[Placement]:
    yield from SliceSearch(problem, room, streams=True, hot=False).best()


@policy("split", "also operators split between CPU and device", slices_alone=True, reason=NOTHING)
def split(problem: Problem, room: Room) -> Iterable[Placement]:
    yield from SliceSearch(problem, room, streams=False, hot=False).best()


@policy(EXPERTS, "also the most used experts on the device", streams=True, slices_alone=True, reason=NOTHING)
def experts(problem: Problem, room: Room) -> Iterable[Placement]:
    if fault := hot_fault(problem):
        raise UsageError(fault)
    made = list(SliceSearch(problem, room, streams=True, hot=True).best())
    yield from made
    if not any(one.hot_bytes for one in made):
        yield from SliceSearch(
            problem, room, streams=True, hot=False
        ).best()  # the search without hot sets finds better slices
