"""Whole operators by affinity: OATO's search over the layers that are on the device, and swaps after it.

The swaps are ours; the paper ends with the greedy fill, which may leave memory unused, or give it to an operator that
saves less per byte than another. A move takes one or two groups of a layer (an operator, attention, an FFN, the whole
layer) to the device or off it. A swap is one move, or a move to the device together with a move off it. The swap that
saves the most is made, until no swap within the budget saves time. A move changes only the device copies of its layer
and the next ones, so savings of distant moves add up. Each swap is priced as a whole before it is made, so no swap
makes the placement slower.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import inf

from oallama.core.types import Operator
from oallama.cost.graph import first_within
from oallama.cost.whole import Costs, placement_seconds, transfer_seconds
from oallama.planner.affinity import AffinityRule, FillRule, algorithm_1, benefits, fill, rank
from oallama.planner.placement import (
    OperatorBudget,
    Placement,
    all_on_cpu,
    last_layers,
    whole_assignments,
    whole_bytes,
)
from oallama.planner.transfers import Transfers


def device_layer_choices(n_layer: int, also: int) -> tuple[int, ...]:
    """Values of first_device_layer to try: 0 (all layers on the device) to n_layer (only the output) in steps of an
    eighth of the layers, and `also`. Attention of a layer runs where its KV is, so a layer whose weights are on the
    host is better off with its KV there."""
    step = max(1, n_layer // 8)
    return tuple(sorted({*range(0, n_layer, step), n_layer, min(also, n_layer)}))


def search(
    costs: Costs,
    budget: OperatorBudget,
    *,
    affinity_rule: AffinityRule = "default",
    fill_rule: FillRule = "continue",
    first_layers: Sequence[int] | None = None,
    transfers: Transfers | None = None,
) -> Placement:
    """The placement with the least predicted time over the passes of `costs`, unless affinity_rule is "paper".

    transfers: those of these costs, to share between searches. first_layers: values of first_device_layer to try; None:
    those of device_layer_choices.

    affinity_rule "paper" is Algorithm 1 as published: T' is never negative (transfers.py says how we interpret T'), the
    placement is the one that the loop converged to, and norms and KV of all layers are on the device, or of as many as
    fit.
    """
    paper = affinity_rule == "paper"
    if first_layers is None:
        first_layers = device_layer_choices(costs.graph.n_layer, last_layers(costs, budget).first_device_layer)
    transfers = transfers or Transfers(costs, paper)
    budgets = [(first, n_bytes) for first in first_layers if (n_bytes := budget(first)) >= 0]
    placements = [
        algorithm_1(costs, n_bytes, first, transfers=transfers, fill_rule=fill_rule, affinity_rule=affinity_rule)
        for first, n_bytes in (budgets[:1] if paper else budgets)
    ]
    fastest = min(placements, key=lambda placement: (placement.seconds, placement.first_device_layer), default=None)
    return fastest or all_on_cpu(costs)


def fill_remaining(
    costs: Costs, budget: OperatorBudget, placement: Placement, affinity_rule: AffinityRule
) -> Placement:
    """Add operators that still fit the device, by falling affinity, whether they gain or not (FillRule "full")."""
    first = placement.first_device_layer
    if first > costs.graph.n_layer:
        return placement
    begin, sides = costs.graph.first_operator(first), list(placement.on_device)
    t_transfer = Transfers(costs, affinity_rule == "paper").of_all(sides, first)
    gains = benefits(costs.operators[begin:], t_transfer)
    order = [begin + i for i in rank(gains) if gains[i] > -inf and not sides[begin + i]]
    remaining = budget(first) - whole_bytes(costs.operators, sides)
    for i in fill(order, [cost.bytes for cost in costs.operators], remaining):
        sides[i] = True
    return replace(placement, assignments=whole_assignments(sides), seconds=placement_seconds(costs, sides, first))


MAX_ROUNDS = 64
"""Most swaps of a search. Of 50 plans of the corpus one takes nine, most take one."""

TRIES = 8
"""Most promising swaps to price in a round; the first that saves time is made. With 1 instead, one of 129 plans is
2.8 % slower: two moves in one layer change each other's device copies."""

LEAST_GAIN = 1e-9  # of the seconds before


@dataclass(frozen=True, slots=True)
class _Move:
    """Operators that change sides, and what that adds: bytes on the device, and seconds."""

    operators: tuple[int, ...]
    added_bytes: int
    added_s: float


def swap_operators(costs: Costs, operators: Sequence[Operator], budget: OperatorBudget, filled: Placement) -> Placement:
    """Swap until no swap saves time; returns `filled` itself if none does. filled: within the budget, without slices.

    Without swaps 10 of 107 plans are slower, by up to 4 %. Swaps of one move against four made none of 42 plans more
    than 0.3 % faster.
    """
    first = filled.first_device_layer
    if first > costs.graph.n_layer:
        return filled
    moves, sides = _Moves(costs, operators, first), list(filled.on_device)
    seconds = placement_seconds(costs, sides, first)
    remaining = budget(first) - whole_bytes(costs.operators, sides)
    for _ in range(MAX_ROUNDS):
        for swap in nsmallest(TRIES, _swaps(moves.at(sides), remaining), key=lambda swap: sum(m.added_s for m in swap)):
            swapped = list(sides)
            for i in (i for move in swap for i in move.operators):
                swapped[i] = not swapped[i]
            swapped_s = placement_seconds(costs, swapped, first)
            if swapped_s < seconds * (1 - LEAST_GAIN):
                sides, seconds = swapped, swapped_s
                remaining -= sum(move.added_bytes for move in swap)
                break
        else:
            break
    if seconds >= filled.seconds * (1 - LEAST_GAIN):
        return filled
    return replace(filled, assignments=whole_assignments(sides), seconds=seconds)


def _swaps(moves: Sequence[_Move], remaining: int) -> Iterator[tuple[_Move, ...]]:
    """Yield promising swaps: each move that fits and saves time; and each move with the best other one by seconds per
    byte that makes room for it, or that uses the room it frees, if both together save time."""
    by_worth = sorted(moves, key=lambda move: move.added_s / max(1, abs(move.added_bytes)))
    adding, freeing = [m for m in by_worth if m.added_bytes > 0], [m for m in by_worth if m.added_bytes <= 0]
    for move in moves:
        room, own = remaining - move.added_bytes, set(move.operators)
        if room >= 0 and move.added_s < 0:
            yield (move,)
        for other in adding if room >= 0 else freeing:
            if move.added_s + other.added_s < 0 and other.added_bytes <= room and own.isdisjoint(other.operators):
                yield move, other
                break


class _Moves:
    """Moves of each layer, with prices. Equal layers between equal neighbours share them."""

    def __init__(self, costs: Costs, operators: Sequence[Operator], first_device_layer: int) -> None:
        graph = costs.graph
        self._costs, self._first = costs, first_device_layer
        self._spans = graph.layer_operators
        kinds: dict[Hashable, int] = {}
        self._kinds, self._groups = [], []
        for layer, (begin, end) in enumerate(self._spans):
            members = operators[begin:end]
            prices = tuple((cost.bytes, cost.t_cpu_s, cost.t_gpu_s) for cost in costs.operators[begin:end])
            kind = (
                graph.layers[layer],
                prices,
                costs.offloaded[begin:end],
                tuple(operator.role for operator in members),
            )
            self._kinds.append(kinds.setdefault(kind, len(kinds)))
            self._groups.append(_groups(members))
        self._known: dict[Hashable, list[_Move]] = {}

    def at(self, sides: Sequence[bool]) -> list[_Move]:
        """Moves of the first layer of each kind in each state."""
        graph, seen, moves = self._costs.graph, set[Hashable](), list[_Move]()
        for layer in range(self._first, graph.n_layer + 1):
            low, high = window = graph.with_neighbours(layer, layer + 1)
            begin, end = graph.operators_of(window)
            state = (layer - low, *self._kinds[low:high], first_within(self._first, window), bytes(sides[begin:end]))
            if state in seen:
                continue
            seen.add(state)
            if state not in self._known:
                self._known[state] = list(self._of(layer, window, sides))
            start = self._spans[layer][0]
            moves += (replace(m, operators=tuple(start + i for i in m.operators)) for m in self._known[state])
        return moves

    def _of(self, layer: int, window: tuple[int, int], sides: Sequence[bool]) -> Iterator[_Move]:
        """Moves of one layer; their operators are counted from the layer's first."""
        costs, (begin, _) = self._costs, self._spans[layer]
        now_s = transfer_seconds(costs, sides, self._first, window)
        singles = {
            frozenset(i for i in group if sides[begin + i] != side and costs.operators[begin + i].t_gpu_s is not None)
            for group in self._groups[layer] for side in (True, False)
        }  # fmt: skip
        flips = {tuple(sorted(a ^ b)) for a in singles for b in singles} | {tuple(sorted(a)) for a in singles}
        for flip in sorted(flips - {()}):
            flipped, members = list(sides), [begin + i for i in flip]
            for i in members:
                flipped[i] = not sides[i]
            n_bytes = sum(costs.operators[i].bytes * (1 if flipped[i] else -1) for i in members)
            seconds = sum((costs.sides_s[i][flipped[i]] - costs.sides_s[i][sides[i]] for i in members), -now_s)
            yield _Move(flip, n_bytes, seconds + transfer_seconds(costs, flipped, self._first, window))


def _groups(members: Sequence[Operator]) -> list[Sequence[int]]:
    """Operators of a layer that may move together: each alone, attention, the FFN, the whole layer. The output has
    no groups."""
    ffn = [i for i, operator in enumerate(members) if operator.role.startswith("ffn_")]
    others = [i for i in range(len(members)) if i not in ffn]
    alone: list[Sequence[int]] = [range(i, i + 1) for i in range(len(members))]
    return alone if any(operator.layer is None for operator in members) else [*alone, others, ffn, range(len(members))]
