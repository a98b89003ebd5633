"""Slices beside whole operators: OATO decides what lies whole on the device, slices take what it leaves.

Pure but for the problem's probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from oallama.core.types import Phase, PrefetchMode, StreamSettings, Workload
from oallama.place.affinity import GRANULARITIES, Granularity, Transfers
from oallama.place.budget import DeviceMemory, for_weights
from oallama.place.exchange import attention, exchange, whole_ffns
from oallama.place.oato import search
from oallama.place.placed import Budget, Placed, cpu, nothing_there
from oallama.place.problem import (
    SMALLEST_UBATCH,
    Decision,
    Problem,
    capacity_of,
    costs_of,
    device_memory,
    nothing_placed,
    operators_limit,
    own_bytes,
)
from oallama.place.slice_plan import SlicePlan
from oallama.place.slicer import N_VALUES, Slicer
from oallama.place.spread import spread
from oallama.place.verify import Proposal, verified, verified_in_rounds

EXPERTS = "experts"
"""As scheinfer, with hot sets of experts; for models whose routing is known."""

SLICED = ("split", "scheinfer", EXPERTS)
"""Policies that slice what OATO leaves."""

NO_SHARE = 0.0
"""Of what OATO was not asked for."""

COARSE_MISSES = 1.0
"""Of a block's seconds."""

N_SLOTS = (2, 1)
"""Of the ring: with two a block is copied while another is computed with; one leaves the memory to weights."""

MUCH_STAGING = 0.1
"""Of the device's memory: where staging takes more, a smaller micro-batch may leave more for weights than it costs."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at where slices lie beside whole operators."""

    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.125)  # of the room for whole operators that OATO may fill
    refinements: tuple[float, ...] = (0.125, 0.0625)  # steps in which the neighbours of the best share are tried
    attention_layers: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)  # the last ones, whose attention is tried whole there
    coarse_values: int = 4  # of r_GG while shares are compared
    fine_values: int = N_VALUES  # of r_GG at the best one
    granularities: tuple[Granularity, ...] = GRANULARITIES  # of OATO
    first_layers: tuple[int, ...] | None = None  # of OATO; None: its own choice
    lowers_ubatch: bool = True  # whether smaller micro-batches are tried
    exchanges: bool = True  # whether operators are exchanged after OATO's fill, and whole FFNs left to slices


THOROUGH = Effort()
QUICK = Effort((1.0, 0.5), (), (1.0,), 4, 4, ("block",), (0,), lowers_ubatch=False, exchanges=False)
"""For questions that are asked of many devices at once, and for a first look."""


@dataclass(frozen=True, slots=True)
class SlicedProposal(Proposal):
    """With the slices beside its whole operators."""

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

    def __init__(
        self, problem: Problem, asked: Workload, phase: Phase, policy: str, prefetch: PrefetchMode, effort: Effort
    ) -> None:
        self._problem, self._asked, self._phase = problem, asked, phase
        self._policy, self._effort = policy, effort
        streams, hot = policy != "split", policy == EXPERTS
        self._first_slicer = Slicer(problem, asked, StreamSettings(prefetch=prefetch), streams, hot)
        self._slicers: dict[tuple[Workload, int], Slicer] = {}
        ahead = policy != "split" and prefetch == "ahead" and not problem.profile.is_blocking
        self._n_slots = N_SLOTS if ahead else (1,)  # where nothing is copied ahead, more gain nothing

    def decide(self) -> Decision:
        """The verified placement with the least predicted time."""
        problem, asked = self._problem, self._asked
        capacity = capacity_of(problem, asked)
        alone = list(self._alone(int(problem.vram_fill * capacity)))
        made: Decision | None = None
        if not problem.slices_only:
            memory, load, notes = device_memory(problem, asked, required=False)
            if memory is not None:
                costs = costs_of(problem, load, self._phase)
                bare = SlicedProposal(load, costs, nothing_there(len(problem.operators), 0), notes)
                propose = self._faster_than(alone, bare)
                made, _ = verified_in_rounds(problem, self._policy, memory, propose)
        least = self._in_fewer_slots(min(alone, key=_seconds), self._effort.fine_values)
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
        shares = self._effort.shares

        def propose(memory: DeviceMemory) -> Proposal | None:
            nonlocal shares
            best = min([*self._beside(bare, memory, shares, alone), *alone], key=_seconds)
            if best.share is None or not best.placed.uses_device(self._problem.graph.n_layer):
                return None
            shares = tuple({1.0: None, best.share: None})
            return self._completed(best)

        return propose

    def _completed(self, proposal: SlicedProposal) -> Proposal:
        """With n_g for batches of any size, and what is to be said of hot experts."""
        plan, placed = proposal.plan, proposal.placed
        if plan is not None and plan.token_assignment:
            plan = self._slicer(proposal).with_table(plan, proposal.room[0])
            placed = self._placed(proposal, placed, plan)
        hot = hot_notes(plan) if self._policy == EXPERTS else ()
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
            whole = SlicedProposal(load, costs, cpu(costs), (lowered,) if load != self._asked else (), room=room)
            made = self._in_slots(whole, self._effort.fine_values, self._n_slots[0])
            plan = made.plan
            if load == self._asked or (plan is not None and not plan.is_empty):
                yield made
            hindered = plan is not None and plan.short and (plan.is_empty or plan.staging_bytes > MUCH_STAGING * limit)
            if not (hindered and self._effort.lowers_ubatch) or load.n_ubatch // 2 < SMALLEST_UBATCH:
                return
            if made.placed.slices is not None:
                if _seconds(made) > least_s:
                    return  # to halve it again frees half as much memory, and adds twice as many passes
                least_s = _seconds(made)
            load = replace(load, n_ubatch=load.n_ubatch // 2)

    def _beside(
        self, bare: SlicedProposal, memory: DeviceMemory, shares: Sequence[float], others: Sequence[SlicedProposal]
    ) -> list[SlicedProposal]:
        """OATO's placements in shares of the room, and the best of them with slices in what they leave.

        bare: what all of them have in common. others: they compete with these.
        """
        problem, effort, costs, n_slots = self._problem, self._effort, bare.costs, self._n_slots[0]
        transfers = Transfers(costs)
        whole: dict[float, SlicedProposal] = {}
        sliced: dict[float, SlicedProposal] = {}

        def budget_of(share: float) -> Budget:
            def budget(first_device_layer: int) -> int:
                room = memory.operator_room(first_device_layer)
                return int(share * room) if room > 0 else room

            return budget

        def look(share: float) -> None:
            if not 0 < share <= 1 or share in whole:
                return
            found = search(costs, problem.operators, budget_of(share), granularities=effort.granularities,
                           first_layers=effort.first_layers, transfers=transfers)  # fmt: skip
            whole[share] = replace(bare, placed=found, share=share)
            same = next((s for s in sliced if _sides(whole[s]) == _sides(whole[share])), None)
            if same is not None:
                sliced[share] = replace(sliced[same], share=share)
            elif found.llama_uses_device(problem.graph.n_layer):
                sliced[share] = self._with_slices(whole[share], memory, effort.coarse_values, n_slots)

        for share in shares:
            look(share)
            if share not in sliced:
                break  # nothing gains as a whole
        if sliced:
            for share in sorted({min(sliced, key=lambda share: _seconds(sliced[share])), min(sliced)}):
                sliced[share] = self._in_fewer_slots(sliced[share], effort.coarse_values)
            n_slots = min(sliced.values(), key=_seconds).n_slots
        for step in effort.refinements if shares == effort.shares else ():
            if sliced:
                best = min(sliced, key=lambda share: _seconds(sliced[share]))
                look(best - step)
                look(best + step)
        found: list[SlicedProposal] = []
        beside: dict[tuple[bool, ...], tuple[SlicedProposal, SlicedProposal | None]] = {}  # with slices, where known
        if sliced:
            best = min(sliced, key=lambda share: _seconds(sliced[share]))
            found += [*(whole[share] for share in sliced), sliced[best]]
            beside[whole[best].placed.on_device] = whole[best], sliced[best]
        held = self._attention(bare, memory)
        attended = [self._with_slices(one, memory, effort.coarse_values, n_slots) for one in held]
        if held:
            chosen = min(range(len(held)), key=lambda i: _seconds(attended[i]))
            if not sliced:
                attended[chosen] = self._in_fewer_slots(attended[chosen], effort.coarse_values)
            found.append(attended[chosen])
            beside.setdefault(held[chosen].placed.on_device, (held[chosen], attended[chosen]))
        if sliced and effort.exchanges:
            for share in {1.0: None, best: None}:
                filled = whole[share].placed
                exchanged = replace(
                    bare, placed=exchange(costs, problem.operators, budget_of(share), filled), share=share
                )
                found.append(exchanged)
                untorn = replace(bare, placed=whole_ffns(costs, problem.operators, filled), share=share)
                for other in (exchanged, untorn):
                    beside.setdefault(other.placed.on_device, (other, None))
        best_of = [
            known or self._with_slices(one, memory, effort.coarse_values, n_slots) for one, known in beside.values()
        ]
        found += best_of
        if effort.fine_values != effort.coarse_values and best_of:
            least_s = min(map(_seconds, [*best_of, *others]))
            to_beat = least_s * (1 + COARSE_MISSES / max(1, sum(problem.splittable)))
            first = min(best_of, key=_seconds)
            found += (
                self._with_slices(one, memory, effort.fine_values, looked.n_slots)
                for (one, _), looked in zip(beside.values(), best_of, strict=True)
                if _seconds(looked) <= to_beat or (looked is first and not _has_n_g(looked))  # finer steps may fit it
            )
        return found + self._spread(found, memory)

    def _spread(self, found: Sequence[SlicedProposal], memory: DeviceMemory) -> list[SlicedProposal]:
        """The best of these with its whole layers spread among the sliced ones, where it streams."""
        best = min(found, key=_seconds, default=None)
        if best is None or best.plan is None or not best.plan.streams:
            return []
        placed = spread(self._problem.operators, self._problem.graph, best.placed)
        if placed.on_device == best.placed.on_device:
            return []
        whole = replace(best, placed=placed, plan=None)
        return [self._with_slices(whole, memory, self._effort.fine_values, best.n_slots)]

    def _attention(self, bare: SlicedProposal, memory: DeviceMemory) -> list[SlicedProposal]:
        """Attention whole on the device, of all layers and of the last ones, where it fits."""
        n_layer = self._problem.graph.n_layer
        firsts = {n_layer - round(part * n_layer) for part in self._effort.attention_layers}
        held = (attention(bare.costs, self._problem.operators, first) for first in sorted(firsts))
        fit = (one for one in held if own_bytes(self._problem, one) <= memory.operator_room(one.first_device_layer))
        return [replace(bare, placed=one, share=NO_SHARE) for one in fit]

    def _with_slices(self, whole: SlicedProposal, memory: DeviceMemory, n_values: int, n_slots: int) -> SlicedProposal:
        """The same with slices in what it leaves of the device's memory, and a ring of so many slots."""
        used = own_bytes(self._problem, whole.placed)
        room = memory.room(whole.placed.first_device_layer) - used
        whole = replace(whole, room=(room, for_weights(room, memory.operators_limit, used)))
        return self._in_slots(whole, n_values, n_slots)

    def _in_fewer_slots(self, made: SlicedProposal, n_values: int) -> SlicedProposal:
        """The same with a smaller ring where that is faster, as it takes memory that weights would gain by; else the
        proposal itself."""
        plan, (room, weights_room) = made.plan, made.room
        if plan is None or not plan.short or (plan.streams and room - plan.staging_bytes >= weights_room):
            return made
        whole = replace(made, placed=replace(made.placed, slices=None))
        others = [self._in_slots(whole, n_values, n) for n in self._n_slots if n < made.n_slots]
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


def _has_n_g(proposal: SlicedProposal) -> bool:
    return proposal.plan is not None and bool(proposal.plan.token_assignment)


def _sides(proposal: SlicedProposal) -> tuple[tuple[bool, ...], int]:
    return proposal.placed.on_device, proposal.placed.first_device_layer


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
