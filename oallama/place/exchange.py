"""An exchange step after OATO's fill. It is ours, not OATO's: the paper ends with the fill, whose greedy may leave
memory unused or hold an operator there that two others would use better.

A change gives one layer's operators other sides: any, or where they are many, one group of them (an operator,
attention, an FFN, the layer) or two are moved to the device or off it. An exchange is one change, or one against
another or up to SEVERAL others: what comes in against what goes out. The exchange with the most predicted seconds
saved is made, again and again, until none saves anything within the room.

What changes in one layer reaches its neighbours only (affinity.Transfers), so changes of layers further apart add up.
Layers that are alike, among neighbours alike, have the same changes at the same price, which is found once. Every
exchange is priced as a whole before it is made, so that what is returned is never slower.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import combinations, product

from oallama.core.types import Operator
from oallama.cost.blocks import ffn_of, is_ffn
from oallama.cost.graph import first_within
from oallama.cost.placement import Costs, placement_seconds, transfer_seconds
from oallama.place.affinity import GRANULARITIES, units
from oallama.place.placed import Budget, Placed, placed_whole, whole_bytes

SEVERAL = 4  # changes against one
MAX_ROUNDS = 64
MAX_LAYERS = 3  # more or fewer with norms and KV on the device
ALL_SIDES = 8  # operators of a layer up to which every other set of sides is a change
MAX_PRICED = 2500  # changes of a layer, in each search for exchanges; some 50 µs each
TRIES = 16  # of the exchanges that look best, how many are priced as a whole
LEAST_GAIN = 1e-9  # of the seconds before


@dataclass(frozen=True, slots=True)
class _Change:
    """Other sides for the operators of one layer."""

    flipped: tuple[int, ...]  # counted from the layer's first operator
    added_bytes: int
    added_s: float


@dataclass(frozen=True, slots=True)
class _Alike:
    """Layers that may make the same changes at the same price."""

    layers: tuple[int, ...]
    changes: tuple[_Change, ...]  # bytes ascending, seconds descending
    sizes: tuple[int, ...]  # bytes of each change


_Known = dict[tuple[object, ...], tuple[_Change, ...]]
"""Changes of a layer, by its state and that of its neighbours."""

Candidate = tuple[float, tuple[tuple[int, _Change], ...]]
"""Seconds added, and which layer makes which change."""


def exchange(costs: Costs, operators: Sequence[Operator], budget: Budget, filled: Placed) -> Placed:
    """The placement after the last exchange that saves time; `filled` itself where none does. Where one more layer or
    one fewer with norms and KV on the device saves more, that many.

    filled: within the budget, without slices. Where there are more changes than are priced, the placement says so.
    """
    n_layer = costs.graph.n_layer
    if not filled.llama_uses_device(n_layer):
        return filled
    layers = _Layers(costs, operators)
    best = _exchanged(layers, budget(filled.first_device_layer), filled)
    for step in (-1, 1):
        for _ in range(MAX_LAYERS):
            first = best.first_device_layer + step
            if not 0 <= first <= n_layer:
                break
            kept = tuple(
                there and at >= first for there, at in zip(best.on_device, costs.graph.operator_layer, strict=True)
            )
            room = budget(first)
            if whole_bytes(costs.operators, kept) > room:
                break
            found = _exchanged(layers, room, replace(best, on_device=kept, first_device_layer=first))
            if found.seconds >= best.seconds * (1 - LEAST_GAIN):
                break
            best = found
    best = filled if best.seconds >= filled.seconds * (1 - LEAST_GAIN) else _noted(best, filled)
    if not layers.left_some:
        return best
    note = f"exchanges were looked for until {MAX_PRICED} changes were priced; there may be better ones"
    return replace(best, notes=(*best.notes, note))


def whole_ffns(costs: Costs, operators: Sequence[Operator], filled: Placed) -> Placed:
    """`filled` without the mul-mats of FFNs that it has only in part on the device; itself where it has none such."""
    families: dict[Hashable, list[int]] = {}
    for index, operator in enumerate(operators):
        if is_ffn(operator):
            families.setdefault(ffn_of(index, operator), []).append(index)
    torn = {i for members in families.values() if len({filled.on_device[i] for i in members}) > 1 for i in members}
    if not torn:
        return filled
    on_device = [there and i not in torn for i, there in enumerate(filled.on_device)]
    return _noted(placed_whole(costs, on_device, filled.first_device_layer), filled)


def attention(costs: Costs, operators: Sequence[Operator], first_device_layer: int) -> Placed:
    """Of the layers from this one on, what is no FFN is whole on the device, norms and KV with it, whatever memory that
    takes. FFNs that are then sliced live there too (cost/blocks.py, residents): one block a layer is left to join."""
    on_device = [
        operator.layer is not None
        and operator.layer >= first_device_layer
        and cost.t_gpu_s is not None
        and not is_ffn(operator)
        for operator, cost in zip(operators, costs.operators, strict=True)
    ]
    return placed_whole(costs, on_device, first_device_layer)


def _noted(placed: Placed, filled: Placed) -> Placed:
    """The placement with a note of what was changed after OATO's fill."""
    n_moved = sum(a != b for a, b in zip(placed.on_device, filled.on_device, strict=True))
    n_layers = abs(placed.first_device_layer - filled.first_device_layer)
    moved = [f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((n_moved, "operator"), (n_layers, "layer")) if n]
    note = f"exchanged after OATO's fill, as predicted to save time: the side of {' and of '.join(moved)}"
    return replace(placed, notes=(note,))


def _exchanged(layers: _Layers, room: int, placed: Placed) -> Placed:
    """After the last exchange that saves time, with its first_device_layer and within `room` bytes."""
    costs, first = layers.costs, placed.first_device_layer
    layers.begin()
    sides = list(placed.on_device)
    used = whole_bytes(costs.operators, sides)
    seconds = placement_seconds(costs, sides, first)
    for _ in range(MAX_ROUNDS):
        for _, changes in nsmallest(
            TRIES, _candidates(layers.alike(sides, first), room - used), key=lambda found: found[0]
        ):
            made = list(sides)
            for layer, change in changes:
                for i in change.flipped:
                    made[layers.begins[layer] + i] ^= True
            made_s = placement_seconds(costs, made, first)
            if made_s < seconds * (1 - LEAST_GAIN):
                sides, seconds = made, made_s
                used += sum(change.added_bytes for _, change in changes)
                break
        else:
            break
    return replace(placed, on_device=tuple(sides), seconds=seconds)


def _candidates(groups: Sequence[_Alike], spare: int) -> Iterator[Candidate]:
    """Exchanges that are predicted to save time and fit the spare bytes."""
    some = [(layer, change) for one in groups for change in one.changes for layer in one.layers[: SEVERAL + 1]]
    out = sorted((at for at in some if at[1].added_bytes < 0), key=lambda at: -at[1].added_s / at[1].added_bytes)
    into = sorted((at for at in some if at[1].added_bytes > 0), key=lambda at: at[1].added_s / at[1].added_bytes)
    for one in groups:
        at = one.layers[0]
        others = [(other, layer) for other in groups if (layer := _beside(other.layers, at)) is not None]
        for change in one.changes:
            left = spare - change.added_bytes
            if change.added_s < 0 <= left:
                yield change.added_s, ((at, change),)
            for other, layer in others:
                found = bisect_right(other.sizes, left) - 1
                if found >= 0 and other.changes[found].flipped:
                    yield from _saving(((at, change), (layer, other.changes[found])))
            several = _several(out if left < 0 else into, at, left)
            if change.flipped and several:
                yield from _saving(((at, change), *several))


def _beside(layers: Sequence[int], at: int) -> int | None:
    """One of these layers that is not `at`, and that it does not reach if there is such a one."""
    return min((layer for layer in layers if layer != at), key=lambda layer: abs(layer - at) < 2, default=None)


def _saving(changes: tuple[tuple[int, _Change], ...]) -> Iterator[Candidate]:
    seconds = sum(change.added_s for _, change in changes)
    if seconds < 0:
        yield seconds, changes


def _several(offered: Sequence[tuple[int, _Change]], at: int, left: int) -> list[tuple[int, _Change]]:
    """Of other layers' changes, best first, up to SEVERAL: what goes out until `left` is no longer negative, or what
    comes into it. Empty where they do not suffice."""
    short = left < 0
    chosen: dict[int, _Change] = {}
    for layer, change in offered:
        if layer != at and layer not in chosen and (short or change.added_bytes <= left):
            chosen[layer] = change
            left -= change.added_bytes
            if len(chosen) == SEVERAL or (short and left >= 0):
                break
    return list(chosen.items()) if left >= 0 else []


class _Layers:
    """The changes that layers may make, each kind priced once. The part behind the last block counts as a layer."""

    def __init__(self, costs: Costs, operators: Sequence[Operator]) -> None:
        graph = costs.graph
        self.costs = costs
        self._layers = range(graph.n_layer + 1)
        self.begins = [begin for begin, _ in graph.layer_operators]
        self._ends = [end for _, end in graph.layer_operators]
        numbers: dict[tuple[object, ...], int] = {}
        self._kinds = [numbers.setdefault(self._kind(operators, layer), len(numbers)) for layer in self._layers]
        self._groups = {
            kind: _groups(operators[self.begins[layer] : self._ends[layer]])
            for layer, kind in reversed(list(enumerate(self._kinds)))
        }
        self._known: _Known = {}
        self._in_part: _Known = {}  # of states of which not all changes were priced in this search
        self._n_priced = 0
        self.left_some = False  # changes that were not priced, as MAX_PRICED were

    def begin(self) -> None:
        """Another search: what the one before had no time for may be priced."""
        self._n_priced = 0
        self._in_part.clear()

    def _kind(self, operators: Sequence[Operator], layer: int) -> tuple[object, ...]:
        """Of layers for which it is the same, equal changes have equal prices."""
        costs, begin, end = self.costs, self.begins[layer], self._ends[layer]
        priced = ((cost.bytes, cost.t_cpu_s, cost.t_gpu_s) for cost in costs.operators[begin:end])
        roles = (operator.role for operator in operators[begin:end])
        return (costs.graph.layers[layer], *roles, *priced, *costs.offloaded[begin:end])

    def alike(self, sides: Sequence[bool], first_device_layer: int) -> list[_Alike]:
        """The layers by their changes; those that have none are left out."""
        members: dict[tuple[object, ...], list[int]] = {}
        for layer in self._layers[first_device_layer:]:
            low, high = self.costs.graph.around(layer, layer + 1)
            state: tuple[object, ...] = (
                layer - low,
                tuple(self._kinds[low:high]),
                first_within(first_device_layer, (low, high)),
                bytes(sides[self.begins[low] : self._ends[high - 1]]),
            )
            members.setdefault(state, []).append(layer)
        found = []
        for state, layers in members.items():
            changes = self._known.get(state) or self._in_part.get(state)
            if changes is None:
                changes = tuple(self._changes(layers[0], sides, first_device_layer))
                known = self._known if self._n_priced < MAX_PRICED else self._in_part
                known[state] = changes
            found.append(_Alike(tuple(layers), changes, tuple(change.added_bytes for change in changes)))
        return found

    def _changes(self, layer: int, sides: Sequence[bool], first_device_layer: int) -> Iterator[_Change]:
        """Those that no other is better than that adds as few bytes; to change nothing is among them unless another
        adds nothing and saves time."""
        costs, begin, end = self.costs, self.begins[layer], self._ends[layer]
        window = costs.graph.around(layer, layer + 1)
        now = tuple(sides[begin:end])
        now_s = transfer_seconds(costs, sides, first_device_layer, window)
        wanted = []
        for there in _other_sides(self._groups[self._kinds[layer]], now):
            flipped = tuple(i for i, (a, b) in enumerate(zip(now, there, strict=True)) if a != b)
            n_bytes, seconds = 0, 0.0
            for i in flipped:
                cost = costs.operators[begin + i]
                gain_s = float("-inf") if cost.t_gpu_s is None else cost.t_cpu_s - cost.t_gpu_s
                n_bytes += cost.bytes if there[i] else -cost.bytes
                seconds -= gain_s if there[i] else -gain_s
            wanted.append((n_bytes, seconds, flipped))
        best = float("inf")
        made = list(sides)
        for n_bytes, seconds, flipped in sorted(wanted):
            if seconds - now_s >= best:  # crossings save at most all that they take
                continue
            if self._n_priced >= MAX_PRICED and flipped:
                self.left_some = True
                continue
            self._n_priced += 1
            for i in flipped:
                made[begin + i] ^= True
            seconds += transfer_seconds(costs, made, first_device_layer, window) - now_s
            for i in flipped:
                made[begin + i] ^= True
            if seconds < best:
                best = seconds
                yield _Change(flipped, n_bytes, seconds)


def _groups(operators: Sequence[Operator]) -> list[tuple[int, ...]]:
    """Of one layer's operators those that may change sides together."""
    return list(dict.fromkeys(unit for granularity in GRANULARITIES for unit in units(operators, granularity)))


def _other_sides(groups: Sequence[tuple[int, ...]], now: Sequence[bool]) -> set[tuple[bool, ...]]:
    """The present sides, and those with one group or two moved to the device or off it; of few operators all."""
    if len(now) <= ALL_SIDES:
        return set(product((False, True), repeat=len(now)))

    def with_group(sides: Sequence[bool], group: Sequence[int], there: bool) -> tuple[bool, ...]:
        return tuple(there if i in group else side for i, side in enumerate(sides))

    moves = [(group, there) for group in groups for there in (True, False)]
    found = {tuple(now)} | {with_group(now, *move) for move in moves}
    return found | {with_group(with_group(now, *a), *b) for a, b in combinations(moves, 2)}
