"""The greedy of ScheInfer, section IV-A4, Eq. 14, for a multiple-choice knapsack. Each block has options: bytes on the
device, and the block's least time with these (Eq. 13). The importance of an option is the time saved per byte added,
against the block's present option. The greedy takes the most important option of all blocks until one does not fit. To
any prefix of that path one further option may be added, so that a larger budget is never worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

OptionCosts = Sequence[tuple[int, float]]
"""(bytes, seconds) of each option of a block, bytes strictly ascending; the first takes no memory."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen option of each block."""

    chosen: tuple[int, ...]  # index into each block's options
    bytes: int
    seconds: float
    budget_limited: bool = False  # a larger budget would change it


def solve_knapsack(options: Sequence[OptionCosts], budget: int, options_of: Sequence[int] | None = None) -> Selection:
    """The selection with the least seconds within `budget` bytes, of those on the greedy's path with one further option
    at most. Ties go to smaller slices and earlier blocks.

    options_of: index into `options` for each block; None: the blocks have one each, in order.
    """
    members: dict[int, list[int]] = defaultdict(list)  # blocks by options
    for block, number in enumerate(range(len(options)) if options_of is None else options_of):
        members[number].append(block)
    largest = max(costs[-1][0] - costs[0][0] for costs in options)
    steps = sorted((-worth, now, number, then) for number in members for worth, now, then in _path(options[number]))
    chosen = [0] * sum(map(len, members.values()))
    n_bytes, seconds = 0, sum(options[number][0][1] * len(alike) for number, alike in members.items())
    best = Selection(tuple(chosen), 0, seconds)

    @cache
    def changes(number: int, now: int) -> list[tuple[float, int, int]]:
        """(seconds saved, bytes added, option) of the larger options that save time, the most first."""
        now_bytes, now_s = options[number][now]
        gains = [(now_s - s, n - now_bytes, then) for then, (n, s) in enumerate(options[number]) if then > now]
        return sorted((change for change in gains if change[0] > 0), key=lambda change: -change[0])

    def ended() -> Selection:
        """The best selection so far, or the present one with the change that fits and saves the most."""
        saved, added, then, block = 0.0, 0, chosen[0], 0
        for number, alike in members.items():
            for at in (alike[0], alike[-1]):  # blocks with the same options have no more than two states
                fits = next((change for change in changes(number, chosen[at]) if change[1] <= budget - n_bytes), None)
                if fits is not None and fits[0] > saved:
                    (saved, added, then), block = fits, at
        if seconds - saved >= best.seconds:
            return best
        return Selection((*chosen[:block], then, *chosen[block + 1 :]), n_bytes + added, seconds - saved)

    for _, now, number, then in steps:
        (now_bytes, now_s), (then_bytes, then_s) = options[number][now], options[number][then]
        for block in members[number]:
            # while every change would still fit after this step, ending after it is no worse than ending before it
            if n_bytes + then_bytes - now_bytes > budget - largest:
                best = ended()
            if n_bytes + then_bytes - now_bytes > budget:
                return replace(best, budget_limited=True)
            chosen[block] = then
            n_bytes, seconds = n_bytes + then_bytes - now_bytes, seconds - (now_s - then_s)
    return ended()


def _path(costs: OptionCosts) -> Iterator[tuple[float, int, int]]:
    """Yield the greedy's steps through one block's options (Eq. 14): (seconds saved per byte, rounded; from option; to
    option). The first number never rises from step to step: a step that is worth more by rounding alone would be taken
    before the steps that lead to it."""
    now, least = 0, inf
    while True:
        (n_bytes, seconds) = costs[now]
        steps = [
            ((seconds - s) / (b - n_bytes), i) for i, (b, s) in enumerate(costs[now + 1 :], now + 1) if s < seconds
        ]
        if not steps:
            return
        most = max(steps)[0]
        then = next(i for worth, i in steps if worth >= most * (1 - TIE))
        least = min(least, float(f"{most:.9g}"))
        yield least, now, then
        now = then


TIE = 1e-9
"""Relative difference in seconds per byte below which two options count as equal: rounding."""
