"""Finding the best of a number of whole layers by measuring: -ngl and -ncmoe. Pure but for what it is given to ask.

The least time need not be at the most layers: a device slower than the CPU wants none. So it is searched, coarse to
fine, and every value that was looked at is kept for the reader.
"""

from __future__ import annotations

from collections.abc import Callable

COARSE = 4  # intervals of the first pass


def largest_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest value in low..high that fits, given that what fits does so for every smaller value too; None where
    not even `low` does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def best_value(low: int, high: int, seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The value in low..high with the least seconds, and all that were measured.

    A grid of COARSE intervals first, then both neighbours of the best at half the distance, down to the next ones:
    some 5 + 2 log2((high - low) / 4) measurements.
    """
    measured: dict[int, float] = {}

    def look(value: int) -> None:
        if low <= value <= high and value not in measured:
            measured[value] = seconds(value)

    step = max((high - low) // COARSE, 1)
    for value in range(low, high + 1, step):
        look(value)
    look(high)
    while True:
        best = min(measured, key=lambda value: (measured[value], value))
        for neighbour in (best - step, best + step):
            look(neighbour)
        moved = min(measured, key=lambda value: (measured[value], value)) != best
        if step == 1 and not moved:
            return best, measured
        if not moved:
            step = max(step // 2, 1)
