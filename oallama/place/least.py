"""The least of a function of an integer that is convex but for its ends, a few kinks and a few valleys."""

from __future__ import annotations

from collections.abc import Callable, Iterable

GRID = 8


def least(
    seconds: Callable[[int], float], low: int, high: int, also: Iterable[int] = (), near: int | None = None
) -> tuple[int, float]:
    """(x, seconds(x)) of the least over low..high; of equals the lowest x.

    Of few numbers all are looked at. Of many the ends by themselves, as the function may jump there; between them GRID
    points and those in `also` (kinks), and then downhill, by ever smaller steps, from each of these that is lower than
    its neighbours: streams that slow each other down may make more than one valley. near: where the least of a function
    much like this one is; then only the ends are looked at, and downhill from there.
    """
    known: dict[int, float] = {}

    def at(x: int) -> float:
        if x not in known:
            known[x] = seconds(x)
        return known[x]

    def downhill(x: int, stride: int, widens: bool) -> None:
        while stride:
            lower = [y for y in (x - stride, x + stride) if first <= y <= last and at(y) < at(x)]
            if lower:
                x = min(lower, key=at)
                stride *= 2 if widens else 1
            else:
                stride //= 2

    for end in {low, high}:
        at(end)
    first, last = low + 1, high - 1
    if last - first <= 2 * GRID:
        for x in range(first, last + 1):
            at(x)
    elif near is not None:
        downhill(min(max(near, first), last), 1, widens=True)
    else:
        grid = {first + (last - first) * i // GRID for i in range(GRID + 1)}
        points = sorted(grid | {x for x in also if first <= x <= last})
        levels = [float("inf"), *map(at, points), float("inf")]
        for i, x in enumerate(points, start=1):
            if levels[i - 1] > levels[i] <= levels[i + 1]:
                downhill(x, (last - first) // (2 * GRID), widens=False)
    best = min(sorted(known), key=at)
    return best, known[best]
