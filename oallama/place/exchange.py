"""Swaps after OATO's fill. They are ours, not OATO's: the paper ends with the fill, whose greedy may leave memory
unused or hold an operator there that another would use better.

A move takes one or two of a layer's groups (an operator, attention, an FFN, the layer) to the device or off it. A swap
is a move, or one against others: what comes in against what goes out. The swap that saves the most is made, again and
again, until none saves anything within the room. What moves in one layer reaches its neighbours only, so moves of
layers further apart add up; each swap is priced as a whole before it is made, so the placement is never slower.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from oallama.core.types import Operator
from oallama.cost.graph import first_within
from oallama.cost.placement import Costs, placement_seconds, transfer_seconds
from oallama.place.affinity import GRANULARITIES, units
from oallama.place.placed import Budget, Placed, whole_bytes
from oallama.place.transfers import Unit

MAX_ROUNDS = 64
TRIES = 8  # of the swaps that look best, how many are priced as a whole
SEVERAL = 4  # moves against one
PLACES = 4  # layers in which the same move is looked at
LEAST_GAIN = 1e-9  # of the seconds before


@dataclass(frozen=True, slots=True)
class _Move:
    """Other sides for these operators."""

    operators: Unit
    added_bytes: int
    added_s: float


def exchange(costs: Costs, operators: Sequence[Operator], budget: Budget, filled: Placed) -> Placed:
    """The placement after the last swap that saves time; `filled` itself where none does. filled: within the budget,
    without slices."""
    first = filled.first_device_layer
    if not filled.llama_uses_device(costs.graph.n_layer):
        return filled
    moves = _Moves(costs, operators, first)
    sides, seconds = list(filled.on_device), filled.seconds
    left = budget(first) - whole_bytes(costs.operators, sides)
    for _ in range(MAX_ROUNDS):
        for swap in nsmallest(TRIES, _swaps(moves.at(sides), left), key=lambda swap: sum(m.added_s for m in swap)):
            made = list(sides)
            for i in (i for move in swap for i in move.operators):
                made[i] = not made[i]
            made_s = placement_seconds(costs, made, first)
            if made_s < seconds * (1 - LEAST_GAIN):
                sides, seconds = made, made_s
                left -= sum(move.added_bytes for move in swap)
                break
        else:
            break
    if seconds >= filled.seconds * (1 - LEAST_GAIN):
        return filled
    return _noted(replace(filled, on_device=tuple(sides), seconds=seconds), filled)


def _swaps(moves: Sequence[_Move], left: int) -> Iterator[tuple[_Move, ...]]:
    """Each move with up to SEVERAL against it, those with the most seconds for each byte first: what goes out until it
    fits, or what comes in while it does. Only what looks as if it saved time."""
    by_worth = sorted(moves, key=lambda move: move.added_s / max(1, abs(move.added_bytes)))
    into, out = ([move for move in by_worth if (move.added_bytes > 0) is comes_in] for comes_in in (True, False))
    for move in moves:
        swap, taken, room = [move], set(move.operators), left - move.added_bytes
        short = room < 0
        for other in out if short else into:
            if len(swap) > SEVERAL or (short and room >= 0):
                break
            if (
                (short or other.added_bytes <= room)
                and (short or other.added_s < 0)
                and taken.isdisjoint(other.operators)
            ):
                swap.append(other)
                taken.update(other.operators)
                room -= other.added_bytes
        if room >= 0 and sum(move.added_s for move in swap) < 0:
            yield tuple(swap)
        if move.added_s < 0 <= left - move.added_bytes and len(swap) > 1:
            yield (move,)


class _Moves:
    """Moves of each layer. Equal layers between equal neighbours have the same moves at the same prices, which are
    computed once."""

    def __init__(self, costs: Costs, operators: Sequence[Operator], first_device_layer: int) -> None:
        graph = costs.graph
        self._costs, self._first = costs, first_device_layer
        self._spans = graph.layer_operators
        kinds: dict[Hashable, int] = {}
        self._kinds, self._units = [], []
        for layer, (begin, end) in enumerate(self._spans):
            own = operators[begin:end]
            prices = tuple((cost.bytes, cost.t_cpu_s, cost.t_gpu_s) for cost in costs.operators[begin:end])
            kind = (graph.layers[layer], prices, costs.offloaded[begin:end], tuple(operator.role for operator in own))
            self._kinds.append(kinds.setdefault(kind, len(kinds)))
            self._units.append(dict.fromkeys(unit for size in GRANULARITIES for unit in units(own, size)))
        self._known: dict[Hashable, list[_Move]] = {}

    def at(self, sides: Sequence[bool]) -> list[_Move]:
        """Moves of up to PLACES layers of each kind in each state."""
        graph, seen, found = self._costs.graph, dict[Hashable, int](), list[_Move]()
        for layer in range(self._first, graph.n_layer + 1):
            low, high = window = graph.around(layer, layer + 1)
            begin, end = graph.operators_of(window)
            state = (layer - low, *self._kinds[low:high], first_within(self._first, window), bytes(sides[begin:end]))
            seen[state] = seen.get(state, 0) + 1
            if seen[state] <= PLACES:
                if state not in self._known:
                    self._known[state] = list(self._of(layer, window, sides))
                start = self._spans[layer][0]
                found += (replace(m, operators=tuple(start + i for i in m.operators)) for m in self._known[state])
        return found

    def _of(self, layer: int, window: tuple[int, int], sides: Sequence[bool]) -> Iterator[_Move]:
        """Operators counted from the layer's first."""
        costs, (begin, _) = self._costs, self._spans[layer]
        now_s, made = transfer_seconds(costs, sides, self._first, window), list(sides)
        singles = {
            frozenset(i for i in unit if sides[begin + i] != there and costs.operators[begin + i].t_gpu_s is not None)
            for unit in self._units[layer] for there in (True, False)
        }  # fmt: skip
        flips = {tuple(sorted(a ^ b)) for a in singles for b in singles} | {tuple(sorted(a)) for a in singles}
        for flip in sorted(flips - {()}):
            n_bytes, seconds = 0, -now_s
            for cost, (cpu_s, gpu_s), there in (
                (costs.operators[begin + i], costs.sides_s[begin + i], sides[begin + i]) for i in flip
            ):
                n_bytes += -cost.bytes if there else cost.bytes
                seconds += cpu_s - gpu_s if there else gpu_s - cpu_s
            for i in flip:
                made[begin + i] = not made[begin + i]
            seconds += transfer_seconds(costs, made, self._first, window)
            for i in flip:
                made[begin + i] = not made[begin + i]
            yield _Move(flip, n_bytes, seconds)


def _noted(placed: Placed, filled: Placed) -> Placed:
    """The placement with a note of what was changed after OATO's fill."""
    n_moved = sum(a != b for a, b in zip(placed.on_device, filled.on_device, strict=True))
    many = "" if n_moved == 1 else "s"
    note = f"exchanged after OATO's fill, as predicted to save time: the side of {n_moved} operator{many}"
    return replace(placed, notes=(note,))
