"""r_GG of every block under a memory limit: the greedy of ScheInfer (section IV-A4, Eq. 14) for a multiple-choice
knapsack.

Each block has a menu: bytes on the device, and the least time that it then takes (Eq. 13). The importance of a choice
is the time that it saves over the block's present one for each byte that it adds. The most important choice of all
blocks is taken, again and again, until it does not fit. One more choice may be taken after any beginning of that path,
so that more memory is never worse.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Menu = Sequence[tuple[int, float]]
"""(bytes, seconds) of each choice of one block, bytes strictly ascending; the first is what costs no memory."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """One choice for each block."""

    chosen: tuple[int, ...]  # index into each block's menu
    bytes: int
    seconds: float
    short: bool = False  # with more room there would be another choice


def assign(menus: Sequence[Menu], room: int) -> Assigned:
    """The choices along the greedy's path, and one beyond it, that take the least seconds within `room` bytes. Ties go
    to earlier blocks and smaller slices."""
    first: dict[Menu, int] = {}
    alike = [first.setdefault(tuple(menu), block) for block, menu in enumerate(menus)]
    states: dict[tuple[int, int], list[int]] = defaultdict(list)  # blocks, ascending, by menu and present choice
    for block, menu_of in enumerate(alike):
        states[menu_of, 0].append(block)
    best = now = Assigned((0,) * len(menus), 0, sum(menu[0][1] for menu in menus))

    def after(step: tuple[float, int, int]) -> Assigned:
        saved, block, choice = step
        added = menus[block][choice][0] - menus[block][now.chosen[block]][0]
        chosen = (*now.chosen[:block], choice, *now.chosen[block + 1 :])
        return Assigned(chosen, now.bytes + added, now.seconds - saved)

    while now.bytes <= room:
        candidates = sorted(blocks[0] for blocks in states.values() if blocks)  # of blocks in equal states the first
        last = _best_step(menus, now.chosen, candidates, room - now.bytes, by_byte=False)
        best = min(best, now if last is None else after(last), key=lambda assigned: assigned.seconds)
        step = _best_step(menus, now.chosen, candidates, None, by_byte=True)
        if step is None:
            return best
        _, block, choice = step
        states[alike[block], now.chosen[block]].remove(block)
        insort(states[alike[block], choice], block)
        now = after(step)
    return Assigned(best.chosen, best.bytes, best.seconds, short=True)


def _best_step(
    menus: Sequence[Menu], chosen: Sequence[int], blocks: Sequence[int], left: int | None, by_byte: bool
) -> tuple[float, int, int] | None:
    """(seconds saved, block, choice) of the choice within `left` bytes that saves the most, for each byte (Eq. 14) or
    in all; None where none saves anything."""
    best: tuple[float, int, int] | None = None
    most = 0.0
    for block in blocks:
        menu, now = menus[block], chosen[block]
        for choice in range(now + 1, len(menu)):
            added, saved = menu[choice][0] - menu[now][0], menu[now][1] - menu[choice][1]
            if left is not None and added > left:
                break
            worth = saved / added if by_byte else saved
            if worth > most:
                best, most = (saved, block, choice), worth
    return best
