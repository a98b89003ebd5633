"""The least of a function of an integer that is convex but for its ends and a few kinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

GRID = 8


def least(seconds: Callable[[int], float], low: int, high: int, also: Iterable[int] = ()) -> tuple[int, float]:
    """(x, seconds(x)) of the least over low..high; of equals the lowest x.

    Both ends are looked at by themselves, as the function may jump there; between them GRID points and those in `also`
    (kinks), and then downhill from the best of these, by ever smaller steps.
    """
    known: dict[int, float] = {}

    def at(x: int) -> float:
        if x not in known:
            known[x] = seconds(x)
        return known[x]

    for end in {low, high}:
        at(end)
    first, last = low + 1, high - 1
    if first <= last:
        grid = {first + (last - first) * i // GRID for i in range(GRID + 1)}
        x = min(sorted(grid | {x for x in also if first <= x <= last}), key=at)
        stride = max(1, (last - first) // (2 * GRID))
        while stride:
            near = [y for y in (x - stride, x + stride) if first <= y <= last and at(y) < at(x)]
            if near:
                x = min(near, key=at)
            else:
                stride //= 2
    best = min(sorted(known), key=at)
    return best, known[best]
