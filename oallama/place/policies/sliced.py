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
from oallama.place.placement import Budget, Decision, Placed, cpu, nothing_there, placed_whole
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
from oallama.place.verify import Proposal, nothing_placed, verified, verified_in_rounds
from oallama.place.whole import exchange, search

Sides = tuple[tuple[bool, ...], int]
"""Which operators are on the device, and from which layer on norms and KV are."""

EXPERTS = "experts"
"""As scheinfer, with hot sets of experts; for models whose routing is known."""

SHARES, QUICK_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125), (1.0, 0.5)
"""Shares of the room for whole operators that OATO may fill."""

SHARE_STEPS = (0.125, 0.0625)
"""From the best share so far to the ones beside it, which are looked at too."""

ATTENTION, QUICK_ATTENTION = (1.0, 0.75, 0.5, 0.25), (1.0,)
"""Shares of the layers, counted from the last, whose attention is tried whole on the device."""

COARSE_VALUES = 4
"""Values of r_GG while placements are compared. Placements within a block's share of the best are cut finely."""

N_SLOTS = (2, 1)
"""Slots of the ring. With two, a block is copied while another is computed; one leaves the memory to weights."""

MUCH_STAGING = 0.1
"""Share of the device's memory. Where staging takes more, a smaller micro-batch may gain more room than it costs."""


@dataclass(frozen=True, slots=True)
class SlicedProposal(Proposal):
    """A proposal that also cuts operators."""

    whole: Placed = Placed((), 0)  # noqa: RUF009 - frozen; without slices
    share: float | None = None  # of the room that OATO was asked to fill; None: llama.cpp has nothing on the device
    plan: SlicePlan | None = None  # of its slices
    room: tuple[int, int] = (0, 0)  # bytes of the device: for these and their staging, and for these alone
    n_slots: int = N_SLOTS[0]  # of the ring that these are streamed through


class Sliced:
    """The `split`, `scheinfer` and `experts` policies: OATO decides what lies whole on the device; what is left on the
    host is sliced, by `scheinfer` three ways and with a share of a prompt's tokens, by `split` into CC and GG. By
    `experts` the device may have the most used experts of a layer instead of a slice through all of them.

    A slice needs nothing of llama.cpp on the device: no KV, no compute buffers, no layers. So OATO is asked for less
    and less of the device's memory, down to none, and what it leaves goes to slices; around the best share it is asked
    whether a little more or less would buy more as slices. OATO's own placement is among the proposals.
    """

    def __init__(self, problem: Problem, asked: Asked, policy: str, streams: bool, hot: bool) -> None:
        """streams: whether weights may be streamed; hot: whether the device may have the most used experts."""
        self._problem, self._asked, self._phase = problem, asked.load, asked.phase
        self._policy, self._hot = policy, hot
        self._quick, self._lowers_ubatch = asked.quick, asked.lowers_ubatch and not asked.quick
        self._fine_values = COARSE_VALUES if asked.quick else N_VALUES
        prefetch = asked.rules.prefetch
        self._first_slicer = Slicer(problem, asked.load, StreamSettings(prefetch=prefetch), streams, hot)
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
            memory, load, notes = device_memory(problem, asked, required=False)
            if memory is not None:
                costs = costs_of(problem, load, self._phase)
                bare = SlicedProposal(load, costs, nothing_there(len(problem.operators), 0), notes)
                propose = self._faster_than(alone, bare)
                made, _ = verified_in_rounds(problem, self._policy, memory, propose)
        least = self._in_fewer_slots(min(alone, key=_seconds), self._fine_values)
        if least.placed.uses_device(problem.graph.n_layer) and (made is None or _seconds(least) < made.placed.seconds):
            made = verified(problem, self._policy, self._completed(least), capacity)  # slices alone take what they say
        if made is not None:
            return made
        reason = f"no operator, and no part of one, is predicted to make it faster on {problem.profile.device}"
        return nothing_placed(problem, self._policy, asked, self._phase, capacity, reason)

    def _faster_than(
        self, alone: Sequence[SlicedProposal], bare: SlicedProposal
    ) -> Callable[[DeviceMemory], Proposal | None]:
        """Proposes the best with whole operators for what the device has room for; None where one of `alone` is better.
        Once all shares of the room were looked at, only the best one and the whole are."""
        shares: tuple[float, ...] = QUICK_SHARES if self._quick else SHARES
        steps: tuple[float, ...] = () if self._quick else SHARE_STEPS

        def propose(memory: DeviceMemory) -> Proposal | None:
            nonlocal shares, steps
            best = min([*self._beside(bare, memory, shares, steps), *alone], key=_seconds)
            shares, steps = tuple({1.0: None, best.share or 1.0: None}), ()
            if best.share is None or not best.placed.uses_device(self._problem.graph.n_layer):
                return None
            return self._completed(best)

        return propose

    def _completed(self, proposal: SlicedProposal) -> Proposal:
        """With n_g for batches of any size, and what is to be said of hot experts."""
        plan, placed = proposal.plan, proposal.placed
        if plan is not None and plan.token_assignment:
            plan = self._slicer(proposal).with_table(plan, proposal.room[0])
            placed = self._placed(proposal, placed, plan)
        hot = hot_notes(plan) if self._hot else ()
        return replace(proposal, placed=placed, notes=(*proposal.notes, *hot))

    def _alone(self, limit: int) -> Iterator[SlicedProposal]:
        """Slices, and llama.cpp on the CPU alone. While memory is short, smaller micro-batches are tried: they leave
        more of it for weights."""
        problem, load, least_s = self._problem, self._asked, inf
        room = (limit, for_weights(limit, operators_limit(problem)))
        while True:
            costs = costs_of(problem, load, self._phase, llama_uses_device=False)
            change = f"lowered from {self._asked.n_ubatch} to {load.n_ubatch} tokens"
            lowered = f"micro-batch {change}, which leaves room for slices"
            notes = (lowered,) if load != self._asked else ()
            whole = SlicedProposal(load, costs, cpu(costs), notes, cpu(costs), room=room)
            made = self._in_slots(whole, self._fine_values, self._n_slots[0])
            plan = made.plan
            if load == self._asked or (plan is not None and not plan.is_empty):
                yield made
            hindered = plan is not None and plan.short and (plan.is_empty or plan.staging_bytes > MUCH_STAGING * limit)
            if not (hindered and self._lowers_ubatch) or load.n_ubatch // 2 < SMALLEST_UBATCH:
                return
            if made.placed.slices is not None:
                if _seconds(made) > least_s:
                    return  # to halve it again frees half as much memory, and adds twice as many passes
                least_s = _seconds(made)
            load = replace(load, n_ubatch=load.n_ubatch // 2)

    def _beside(
        self, bare: SlicedProposal, memory: DeviceMemory, shares: Sequence[float], steps: Sequence[float]
    ) -> list[SlicedProposal]:
        """OATO's placements in shares of the room, and attention whole, with slices in what they leave. bare: what all
        of them have in common. steps: from the best share to others that are looked at."""
        looked: dict[Sides, SlicedProposal] = {}

        def look(placed: Placed, share: float) -> SlicedProposal:
            sides = placed.on_device, placed.first_device_layer
            if sides not in looked:
                whole = replace(bare, placed=placed, whole=placed, share=share)
                made = self._with_slices(whole, memory, COARSE_VALUES, self._n_slots[0])
                looked[sides] = self._in_fewer_slots(made, COARSE_VALUES)
            return looked[sides]

        transfers, found = Transfers(bare.costs), dict[float, SlicedProposal]()
        for share in shares:
            placed = self._filled(bare.costs, memory, share, transfers)
            if not placed.llama_uses_device(self._problem.graph.n_layer):
                break  # nothing gains as a whole
            found[share] = look(placed, share)
        for step in steps if found else ():
            best_share = min(found, key=lambda share: _seconds(found[share]))
            for share in (best_share - step, best_share + step):
                if 0 < share <= 1:
                    found[share] = look(self._filled(bare.costs, memory, share, transfers), share)
        if found and not self._quick:
            best_share = min(found, key=lambda share: _seconds(found[share]))
            for share in {1.0, best_share}:  # all of the room: as `oato` has it
                budget = self._budget(memory, share)
                look(exchange(bare.costs, self._problem.operators, budget, found[share].whole), share)
        whole = [_whole(one) for one in looked.values()]
        for placed in self._attention(bare, memory):
            look(placed, 0.0)
        least_s = min(map(_seconds, looked.values()), default=inf)
        near_s = least_s * (1 + 1 / max(1, sum(self._problem.splittable)))
        best = [one for one in looked.values() if _seconds(one) <= near_s]
        fine = [self._with_slices(_whole(one), memory, self._fine_values, one.n_slots) for one in best]
        return [*whole, *best, *fine]

    def _filled(self, costs: Costs, memory: DeviceMemory, share: float, transfers: Transfers) -> Placed:
        """OATO's placement in a share of the room."""
        quick: dict[str, Any] = {"granularities": ("block",), "first_layers": (0,)} if self._quick else {}
        return search(costs, self._problem.operators, self._budget(memory, share), transfers=transfers, **quick)

    def _budget(self, memory: DeviceMemory, share: float) -> Budget:
        def budget(first_device_layer: int) -> int:
            room = memory.operator_room(first_device_layer)
            return int(share * room) if room > 0 else room

        return budget

    def _attention(self, bare: SlicedProposal, memory: DeviceMemory) -> list[Placed]:
        """Attention whole on the device, of all layers and of the last ones, where it fits."""
        n_layer = self._problem.graph.n_layer
        parts = QUICK_ATTENTION if self._quick else ATTENTION
        firsts = sorted({n_layer - round(part * n_layer) for part in parts})
        held = (attention(bare.costs, self._problem.operators, first) for first in firsts)
        return [one for one in held if own_bytes(self._problem, one) <= memory.operator_room(one.first_device_layer)]

    def _with_slices(self, whole: SlicedProposal, memory: DeviceMemory, n_values: int, n_slots: int) -> SlicedProposal:
        """The same with slices in what it leaves of the device's memory, and a ring of so many slots."""
        used, memory = own_bytes(self._problem, whole.placed), memory.beside_split
        room = memory.room(whole.placed.first_device_layer) - used
        whole = replace(whole, room=(room, for_weights(room, memory.operators_limit, used)))
        return self._in_slots(whole, n_values, n_slots)

    def _in_fewer_slots(self, made: SlicedProposal, n_values: int) -> SlicedProposal:
        """The same with a smaller ring where that is faster, as it takes memory that weights would gain by; else the
        proposal itself."""
        plan, (room, weights_room) = made.plan, made.room
        if plan is None or not plan.short or (plan.streams and room - plan.staging_bytes >= weights_room):
            return made
        others = [self._in_slots(_whole(made), n_values, n) for n in self._n_slots if n < made.n_slots]
        return min([made, *(one for one in others if one.placed.slices is not None)], key=_seconds)

    def _in_slots(self, whole: SlicedProposal, n_values: int, n_slots: int) -> SlicedProposal:
        """The same with slices in its room, and a ring of so many slots."""
        whole = replace(whole, n_slots=n_slots)
        plan = self._slicer(whole).plan(whole.placed, *whole.room, n_values)
        if plan is None or plan.is_empty:
            return replace(whole, plan=plan)
        return replace(whole, placed=self._placed(whole, whole.placed, plan), plan=plan)

    def _placed(self, proposal: SlicedProposal, placed: Placed, plan: SlicePlan) -> Placed:
        return self._slicer(proposal).placed(placed, plan, self._phase)

    def _slicer(self, proposal: SlicedProposal) -> Slicer:
        key = (proposal.workload, proposal.n_slots)
        if key not in self._slicers:
            self._slicers[key] = self._first_slicer.varied(*key)
        return self._slicers[key]


def _seconds(proposal: SlicedProposal) -> float:
    return proposal.placed.seconds


def _whole(proposal: SlicedProposal) -> SlicedProposal:
    """Without its slices."""
    return replace(proposal, placed=proposal.whole, plan=None)


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


def hot_notes(plan: SlicePlan | None) -> tuple[str, ...]:
    """How much of the traffic the hot experts are expected to serve."""
    hot = [(of, cut) for of, cut in plan.layers if cut.n_hot] if plan is not None else []
    if not hot:
        return ()
    n_hot, n_all = sum(cut.n_hot for _, cut in hot), sum(of.n_expert for of, _ in hot)
    decode, prompt = (
        sum(of.use.coverage(cut.n_hot, n) for of, cut in hot if of.use is not None) / len(hot) for n in (1, 2)
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
    return Sliced(problem, asked, "split", streams=False, hot=False).decide()


def _scheinfer(problem: Problem, asked: Asked) -> Decision:
    return Sliced(problem, asked, "scheinfer", streams=True, hot=False).decide()


def _experts(problem: Problem, asked: Asked) -> Decision:
    if fault := hot_fault(problem.operators, problem.routing):
        raise UsageError(fault)
    made = Sliced(problem, asked, EXPERTS, streams=True, hot=True).decide()
    if has_hot(made):
        return made
    slices = replace(_scheinfer(problem, asked), policy=EXPERTS)  # the search without hot sets finds better slices
    return min(made, slices, key=lambda decision: decision.placed.seconds)


register(Policy("scheinfer", "besides, weights streamed to the device", _scheinfer, streams=True))
register(Policy("split", "besides, operators computed by CPU and device at the same time", _split))
register(Policy(EXPERTS, "besides, the experts that are used most", _experts, streams=True))
