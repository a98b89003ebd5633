"""Sharing device memory among blocks that may each take more or less of it: a multiple-choice knapsack, solved by
greatest marginal gain per byte (ScheInfer, Eq. 14, asks for the same importance, one step at a time)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Menu = Sequence[tuple[int, float]]
"""(bytes, seconds) of each choice of one block, bytes strictly ascending; the first is what costs no memory."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One choice for each block."""

    chosen: tuple[int, ...]  # index into each block's menu
    bytes: int
    seconds: float
    bound_s: float  # no allocation within the room takes less
    short: bool  # with more room there would be another choice


def allocate(menus: Sequence[Menu], room: int) -> Allocation:
    """The choices with the least total seconds within `room` bytes, as far as a greedy finds them.

    Each block walks along the lower convex hull of its menu; the step with the most seconds saved per byte goes first.
    Exact where every step that saves time fits, and where the room is used up at the first step that does not. Else
    what that step would have saved bounds the distance to the best, and `bound_s` says how far it can be at most: it is
    the value of the relaxation in which that step may be taken in part. What room is left then goes to choices off the
    hull. Ties go to earlier blocks.
    """
    chosen = [0] * len(menus)
    left = room
    seconds = sum(menu[0][1] for menu in menus)
    bound_s: float | None = None
    closed: set[int] = set()
    steps = sorted(step for block, menu in enumerate(menus) for step in _hull_steps(block, menu))
    for rate, block, start, end in steps:
        (start_bytes, start_s), (end_bytes, end_s) = menus[block][start], menus[block][end]
        if end_bytes - start_bytes > left and bound_s is None:
            bound_s = seconds + rate * left  # rates are negative
        if end_bytes - start_bytes > left or block in closed:
            closed.add(block)
            continue
        chosen[block] = end
        left -= end_bytes - start_bytes
        seconds += end_s - start_s
    short = bound_s is not None
    if short:
        left = _fill(menus, chosen, left)
    seconds = sum(menu[c][1] for menu, c in zip(menus, chosen, strict=True))
    return Allocation(tuple(chosen), room - left, seconds, seconds if bound_s is None else min(bound_s, seconds), short)


def _hull_steps(block: int, menu: Menu) -> list[tuple[float, int, int, int]]:
    """(seconds per byte, negative and rising; block; from choice; to choice) along the lower hull, down to the choice
    that takes the least seconds."""
    hull = [0]
    for i in range(1, len(menu)):
        if menu[i][1] >= menu[hull[-1]][1]:
            continue  # more memory, and no faster
        while len(hull) > 1 and _rate(menu, hull[-2], hull[-1]) > _rate(menu, hull[-2], i):
            hull.pop()
        hull.append(i)
    return [(_rate(menu, a, b), block, a, b) for a, b in pairwise(hull)]


def _rate(menu: Menu, start: int, end: int) -> float:
    return (menu[end][1] - menu[start][1]) / (menu[end][0] - menu[start][0])


def _fill(menus: Sequence[Menu], chosen: list[int], left: int) -> int:
    """Change one block at a time to the choice within what is left that saves the most; returns what then is left."""
    while True:
        best: tuple[float, int, int] | None = None  # (seconds saved, negative; block; choice)
        for block, menu in enumerate(menus):
            now_bytes, now_s = menu[chosen[block]]
            for choice, (n_bytes, seconds) in enumerate(menu):
                if n_bytes > now_bytes + left:
                    break
                if seconds < now_s and (best is None or seconds - now_s < best[0]):
                    best = (seconds - now_s, block, choice)
        if best is None:
            return left
        _, block, choice = best
        left -= menus[block][choice][0] - menus[block][chosen[block]][0]
        chosen[block] = choice
