"""r_GG of every block under a memory limit: the greedy of ScheInfer (section IV-A4, Eq. 14) for a multiple-choice
knapsack.

Each block has a menu: bytes on the device, and the least time that it then takes (Eq. 13). The importance of a choice
is the time that it saves over the block's present one for each byte that it adds. The most important choice of all
blocks is taken, again and again, until it does not fit. One more choice may be taken after any beginning of that path,
so that more memory is never worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

TIE = 1e-9
"""Of what a byte is worth: by less two choices do not differ."""

Menu = Sequence[tuple[int, float]]
"""(bytes, seconds) of each choice of one block, bytes strictly ascending; the first is what costs no memory."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """One choice for each block."""

    chosen: tuple[int, ...]  # index into each block's menu
    bytes: int
    seconds: float
    short: bool = False  # with more room there would be another choice


def assign(menus: Sequence[Menu], room: int, of: Sequence[int] | None = None) -> Assigned:
    """The choices along the greedy's path, and one beyond it, that take the least seconds within `room` bytes. Ties go
    to earlier blocks and smaller slices.

    of: the menu of each block; None: each has its own. Where steps of equal blocks are worth the same, all of them take
    the first one before one takes the second.
    """
    blocks = range(len(menus)) if of is None else of
    largest = max(menu[-1][0] - menu[0][0] for menu in menus)
    states: dict[tuple[int, int], list[int]] = defaultdict(list)  # blocks, ascending, by menu and present choice
    for block, menu_of in enumerate(blocks):
        states[menu_of, 0].append(block)
    chosen = [0] * len(blocks)
    n_bytes, seconds = 0, sum(menus[menu_of][0][1] for menu_of in blocks)
    best = Assigned(tuple(chosen), 0, seconds)

    @cache
    def offer(menu_of: int, now: int) -> _Offer:
        return _Offer(menus[menu_of], now)

    while n_bytes <= room:
        # of blocks in equal states the first
        found = [(members[0], offer(*state), state) for state, members in sorted(states.items(), key=_first) if members]
        most = max(one.by_byte for _, one, _ in found) * (1 - TIE)
        equal = [one for one in found if one[1].by_byte >= most]
        step = min(equal, key=lambda one: one[2][1])
        (saved, added, choice), (menu_of, now) = step[1].step, step[2]
        goes_on = step[1].by_byte > 0
        # while anything would fit behind the next step, that is no worse to end with than this
        n_taken = min(len(states[menu_of, now]), (room - largest - n_bytes) // max(1, added)) if goes_on else 0
        if n_taken < 1:
            ends = ((block, *end) for block, one, _ in found if (end := one.within(room - n_bytes)) is not None)
            last = max(ends, key=lambda end: end[1], default=None)
            if last is not None and seconds - last[1] < best.seconds:
                block, more_s, more, then = last
                best = Assigned((*chosen[:block], then, *chosen[block + 1 :]), n_bytes + more, seconds - more_s)
            elif seconds < best.seconds:
                best = Assigned(tuple(chosen), n_bytes, seconds)
            if not goes_on:
                return best
            n_taken = 1
        members = states[menu_of, now]
        taken, states[menu_of, now] = members[:n_taken], members[n_taken:]
        states[menu_of, choice] = sorted((*states[menu_of, choice], *taken))
        for block in taken:
            chosen[block] = choice
            n_bytes, seconds = n_bytes + added, seconds - saved
    return replace(best, short=True)


def _first(state: tuple[tuple[int, int], list[int]]) -> int:
    return state[1][0] if state[1] else -1


class _Offer:
    """What a block may choose instead of its present choice, if it saves time: (seconds saved, bytes added, choice)."""

    def __init__(self, menu: Menu, now: int) -> None:
        n_bytes, seconds = menu[now]
        steps = [(seconds - s, b - n_bytes, choice) for choice, (b, s) in enumerate(menu) if choice > now]
        self._steps = [step for step in steps if step[0] > 0]
        most = max((saved / added for saved, added, _ in self._steps), default=0.0) * (1 - TIE)
        self.step = next((step for step in self._steps if step[0] / step[1] >= most), (0.0, 0, now))
        """The one that saves the most for each byte (Eq. 14)."""
        self.by_byte = self.step[0] / self.step[1] if self._steps else 0.0
        self._most = max(self._steps, key=lambda step: step[0], default=None)

    def within(self, left: int) -> tuple[float, int, int] | None:
        """The one that saves the most in all, of those that add no more than so many bytes."""
        if self._most is None or self._most[1] <= left:
            return self._most
        return max((step for step in self._steps if step[1] <= left), key=lambda step: step[0], default=None)
