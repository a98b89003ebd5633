"""Slices beside whole operators: OATO decides what lies whole on the device, slices take what it leaves.

Pure but for the problem's probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from oallama.core.errors import UsageError
from oallama.core.routing import Routing
from oallama.core.types import Operator, StreamSettings, Workload
from oallama.cost.blocks import is_ffn
from oallama.cost.experts import expert_use
from oallama.cost.whole import Costs
from oallama.place.affinity import Transfers
from oallama.place.memory import DeviceMemory, for_weights, usable
from oallama.place.placement import Budget, Decision, Placed, cpu, placed_whole
from oallama.place.policies.registry import Asked, Policy, register
from oallama.place.problem import (
    SMALLEST_UBATCH,
    Problem,
    capacity_of,
    costs_of,
    device_memory,
    operators_limit,
    own_bytes,
)
from oallama.place.sharing import N_VALUES, SlicePlan, Slicer
from oallama.place.verify import nothing_placed, verified, verified_in_rounds
from oallama.place.whole import exchange, search

Sides = tuple[tuple[bool, ...], int]
"""Which operators are on the device, and from which layer on norms and KV are."""

EXPERTS = "experts"
"""Policy scheinfer with hot sets of experts, for models whose routing is known."""

SHARES, QUICK_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125), (1.0, 0.5)
"""Shares of the room for whole operators that OATO may fill."""

SHARE_STEPS = (0.125, 0.0625)
"""From the best share so far to the ones beside it, which are looked at too: without them one plan of the corpus' 129
is 2.1 % slower."""

ATTENTION, QUICK_ATTENTION = (1.0, 0.5), (1.0,)
"""Shares of the layers, counted from the last, whose attention is tried whole on the device: without them three of 29
plans are slower, by up to 4.1 %; quarters between them change none of 31."""

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
    whole: Placed
    seconds: float  # of the phase, cuts included
    room: tuple[int, int] = (0, 0)  # bytes of the device: for cuts and their staging, and for cuts alone
    share: float | None = None  # of the room that OATO was asked to fill; None: llama.cpp has nothing on the device
    n_slots: int = N_SLOTS[0]  # of the ring that cuts are streamed through
    plan: SlicePlan | None = None  # None: nothing is cut
    short: bool = False  # with more of the device's memory there would be other cuts


class SliceSearch:
    """The `split`, `scheinfer` and `experts` policies: OATO decides what lies whole on the device; what is left on the
    host is sliced, by `scheinfer` three ways and with a share of a prompt's tokens, by `split` into CC and GG. By
    `experts` the device may have the most used experts of a layer instead of a slice through all of them.

    A slice needs nothing of llama.cpp on the device: no KV, no compute buffers, no layers. So OATO is asked for less
    and less of the device's memory, down to none, and what it leaves goes to slices; around the best share it is asked
    whether a little more or less would buy more as slices. OATO's own placement is among the trials.
    """

    def __init__(self, problem: Problem, asked: Asked, policy: str, streams: bool, hot: bool) -> None:
        """streams: whether weights may be streamed; hot: whether the device may have the most used experts."""
        self._problem, self._asked, self._phase = problem, asked.workload, asked.phase
        self._policy, self._hot = policy, hot
        self._quick, self._lowers_ubatch = asked.quick, asked.lowers_ubatch and not asked.quick
        self._fine_values = COARSE_VALUES if asked.quick else N_VALUES
        prefetch = asked.rules.prefetch
        self._first_slicer = Slicer(problem, asked.workload, StreamSettings(prefetch=prefetch), streams, hot)
        self._slicers: dict[tuple[Workload, int], Slicer] = {}
        ahead = streams and prefetch == "ahead" and not problem.profile.is_blocking
        self._n_slots = N_SLOTS if ahead else (1,)  # where nothing is copied ahead, more gain nothing

    def decide(self) -> Decision:
        """The verified placement with the least predicted time."""
        problem, asked = self._problem, self._asked
        capacity = capacity_of(problem, asked)
        alone = list(self._alone(usable(capacity, problem.vram_fill, problem.runtime_bytes)))
        made: Decision | None = None
        if not problem.slices_only:
            memory, workload, notes = device_memory(problem, asked, required=False)
            if memory is not None:
                costs = costs_of(problem, workload, self._phase)
                propose = self._faster_than(alone, workload, costs)
                made, _ = verified_in_rounds(problem, self._policy, workload, costs, memory, propose, notes)
        least = min(alone, key=_seconds)
        if made is None or least.seconds <= self._near(made.placed.seconds):
            least = self._finely([least])
        if least.plan is not None and (made is None or least.seconds < made.placed.seconds):
            workload, notes = least.workload, ()
            if workload != asked:
                change = f"lowered from {asked.n_ubatch} to {workload.n_ubatch} tokens"
                notes = (f"micro-batch {change}, which leaves room for slices",)
            costs = costs_of(problem, workload, self._phase, llama_uses_device=False)
            made = verified(problem, self._policy, workload, costs, self._placed(least), notes, capacity)
        if made is not None:
            return made
        reason = f"no operator, and no part of one, is predicted to make it faster on {problem.profile.device}"
        return nothing_placed(problem, self._policy, asked, self._phase, capacity, reason)

    def _faster_than(
        self, alone: Sequence[Trial], workload: Workload, costs: Costs
    ) -> Callable[[DeviceMemory], Placed | None]:
        """Proposes the best with whole operators for what the device has room for; None where one of `alone` is better.
        Once all shares of the room were looked at, only the best one and the whole are."""
        shares: tuple[float, ...] = QUICK_SHARES if self._quick else SHARES
        steps: tuple[float, ...] = () if self._quick else SHARE_STEPS

        def propose(memory: DeviceMemory) -> Placed | None:
            nonlocal shares, steps
            best = min([*self._beside(workload, costs, memory, shares, steps), *alone], key=_seconds)
            shares, steps = tuple({1.0: None, best.share or 1.0: None}), ()
            return None if best.share is None else self._placed(best)

        return propose

    def _placed(self, trial: Trial) -> Placed:
        """The trial as a placement, with n_g for batches of any size, and what is to be said of hot experts."""
        plan = trial.plan
        if plan is None:
            return trial.whole
        slicer = self._slicer(trial.workload, trial.n_slots)
        if plan.token_assignment:
            plan = slicer.with_table(plan, trial.room[0])
        placed = slicer.placed(trial.whole, plan, self._phase)
        return replace(placed, notes=(*placed.notes, *hot_notes(plan))) if self._hot else placed

    def _alone(self, limit: int) -> Iterator[Trial]:
        """Slices, and llama.cpp on the CPU alone. While memory is short, smaller micro-batches are tried: they leave
        more of it for weights."""
        problem, workload, least_s = self._problem, self._asked, inf
        room = (limit, for_weights(limit, operators_limit(problem)))
        while True:
            whole = cpu(costs_of(problem, workload, self._phase, llama_uses_device=False))
            made = self._cut(Trial(workload, whole, whole.seconds, room), COARSE_VALUES)
            if workload == self._asked or made.plan is not None:
                yield made
            hindered = made.short and (made.plan is None or made.plan.staging_bytes > MUCH_STAGING * limit)
            if not (hindered and self._lowers_ubatch) or workload.n_ubatch // 2 < SMALLEST_UBATCH:
                return
            if made.plan is not None:
                if made.seconds > least_s:
                    return  # to halve it again frees half as much memory, and adds twice as many passes
                least_s = made.seconds
            workload = replace(workload, n_ubatch=workload.n_ubatch // 2)

    def _beside(
        self, workload: Workload, costs: Costs, memory: DeviceMemory, shares: Sequence[float], steps: Sequence[float]
    ) -> list[Trial]:
        """OATO's placements in shares of the room, and attention whole, with slices in what they leave. steps: from the
        best share to others that are looked at."""
        looked: dict[Sides, Trial] = {}
        transfers, found = Transfers(costs), dict[float, Trial]()

        def look(whole: Placed, share: float) -> Trial:
            sides = whole.on_device, whole.first_device_layer
            if sides not in looked:
                used, split = own_bytes(self._problem, whole), memory.beside_split
                room = split.room(whole.first_device_layer) - used
                rooms = (room, for_weights(room, split.operators_limit, used))
                made = self._cut(Trial(workload, whole, whole.seconds, rooms, share), COARSE_VALUES)
                plan = made.plan
                if made.short and (plan is None or not plan.streams or plan.staging_bytes > MUCH_STAGING * room):
                    made = min([made, *(self._cut(made, COARSE_VALUES, n) for n in self._n_slots[1:])], key=_seconds)
                looked[sides] = made
            return looked[sides]

        for share in shares:
            placed = self._filled(costs, memory, share, transfers)
            if not placed.llama_uses_device(self._problem.graph.n_layer):
                break  # nothing gains as a whole
            found[share] = look(placed, share)
        for step in steps if found else ():
            best_share = min(found, key=lambda share: found[share].seconds)
            for share in (best_share - step, best_share + step):
                if 0 < share <= 1:
                    found[share] = look(self._filled(costs, memory, share, transfers), share)
        if found and not self._quick:
            best_share = min(found, key=lambda share: found[share].seconds)
            for share in {1.0, best_share}:  # all of the room: as `oato` has it
                budget = self._budget(memory, share)
                look(exchange(costs, self._problem.operators, budget, found[share].whole), share)
        whole = [_uncut(one) for one in looked.values()]
        for placed in self._attention(costs, memory):
            look(placed, 0.0)
        near_s = self._near(min(map(_seconds, looked.values()), default=inf))
        best = [one for one in looked.values() if one.seconds <= near_s]
        return [*whole, *best, *([self._finely(best)] if best else ())]

    def _filled(self, costs: Costs, memory: DeviceMemory, share: float, transfers: Transfers) -> Placed:
        """OATO's placement in a share of the room."""
        quick: dict[str, Any] = {"granularities": ("block",), "first_layers": (0,)} if self._quick else {}
        return search(costs, self._problem.operators, self._budget(memory, share), transfers=transfers, **quick)

    def _budget(self, memory: DeviceMemory, share: float) -> Budget:
        def budget(first_device_layer: int) -> int:
            room = memory.operator_room(first_device_layer)
            return int(share * room) if room > 0 else room

        return budget

    def _attention(self, costs: Costs, memory: DeviceMemory) -> list[Placed]:
        """Attention whole on the device, of all layers and of the last ones, where it fits."""
        n_layer = self._problem.graph.n_layer
        parts = QUICK_ATTENTION if self._quick else ATTENTION
        firsts = sorted({n_layer - round(part * n_layer) for part in parts})
        whole = (attention(costs, self._problem.operators, first) for first in firsts)
        return [one for one in whole if own_bytes(self._problem, one) <= memory.operator_room(one.first_device_layer)]

    def _near(self, seconds: float) -> float:
        """Within a block's share of it a trial that was cut coarsely may be the best one."""
        return seconds * (1 + 1 / max(1, sum(self._problem.splittable)))

    def _finely(self, trials: Sequence[Trial]) -> Trial:
        """The best of these, cut finely; with another number of slots where that is better."""
        best = min((self._cut(one, self._fine_values, one.n_slots) for one in trials), key=_seconds)
        others = (self._cut(best, self._fine_values, n) for n in self._n_slots if n != best.n_slots)
        return min([best, *others], key=_seconds)

    def _cut(self, trial: Trial, n_values: int, n_slots: int | None = None) -> Trial:
        """Cut what the trial leaves on the host anew, in its room, with a ring of so many slots; None: of the most."""
        n_slots = n_slots or self._n_slots[0]
        plan = self._slicer(trial.workload, n_slots).plan(trial.whole, *trial.room, n_values)
        trial = replace(_uncut(trial), n_slots=n_slots, short=plan is not None and plan.short)
        if plan is None or plan.is_empty:
            return trial
        return replace(trial, plan=plan, seconds=plan.predicted(trial.workload).over(self._phase))

    def _slicer(self, workload: Workload, n_slots: int) -> Slicer:
        if (workload, n_slots) not in self._slicers:
            self._slicers[workload, n_slots] = self._first_slicer.varied(workload, n_slots)
        return self._slicers[workload, n_slots]


def _seconds(trial: Trial) -> float:
    return trial.seconds


def _uncut(trial: Trial) -> Trial:
    return replace(trial, plan=None, seconds=trial.whole.seconds)


def attention(costs: Costs, operators: Sequence[Operator], first_device_layer: int) -> Placed:
    """Place all but FFNs of the layers from this one on whole on the device, norms and KV with it, whatever memory that
    takes. FFNs that are then sliced live there too (cost/blocks.py, residents): one block a layer is left to join."""
    on_device = [
        operator.layer is not None
        and operator.layer >= first_device_layer
        and cost.t_gpu_s is not None
        and not is_ffn(operator)
        for operator, cost in zip(operators, costs.operators, strict=True)
    ]
    return placed_whole(costs, on_device, first_device_layer)


def hot_notes(plan: SlicePlan) -> tuple[str, ...]:
    """How much of the traffic the hot experts are expected to serve."""
    hot = [(cost, cut) for cost, cut in plan.layers if cut.n_hot]
    if not hot:
        return ()
    n_hot, n_all = sum(cut.n_hot for _, cut in hot), sum(cost.n_expert for cost, _ in hot)
    decode, prompt = (
        sum(cost.use.coverage(cut.n_hot, n) for cost, cut in hot if cost.use is not None) / len(hot) for n in (1, 2)
    )
    return (
        f"{n_hot} of {n_all} experts of {len(hot)} layers are kept on the device by use; of later traffic such sets "
        f"served {decode:.0%} in decode and {prompt:.0%} in prompts",
    )


#
# the policies
#


def has_hot(decision: Decision) -> bool:
    return decision.placed.slices is not None and decision.placed.slices.hot_bytes > 0


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


def _split(problem: Problem, asked: Asked) -> Decision:
    return SliceSearch(problem, asked, "split", streams=False, hot=False).decide()


def _scheinfer(problem: Problem, asked: Asked) -> Decision:
    return SliceSearch(problem, asked, "scheinfer", streams=True, hot=False).decide()


def _experts(problem: Problem, asked: Asked) -> Decision:
    if fault := hot_fault(problem.operators, problem.routing):
        raise UsageError(fault)
    made = SliceSearch(problem, asked, EXPERTS, streams=True, hot=True).decide()
    if has_hot(made):
        return made
    slices = replace(_scheinfer(problem, asked), policy=EXPERTS)  # the search without hot sets finds better slices
    return min(made, slices, key=lambda decision: decision.placed.seconds)


register(Policy("scheinfer", "besides, weights streamed to the device", _scheinfer, streams=True))
register(Policy("split", "besides, operators computed by CPU and device at the same time", _split))
register(Policy(EXPERTS, "besides, the experts that are used most", _experts, streams=True))
