"""Progress bars on stderr: of the turns of a comparison, and of the time that the gate may take."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oallama.cli.output import is_terminal

if TYPE_CHECKING:
    from oallama.bench.ab import ProgressCallback

PREPARING = "{elapsed} {desc}"
TURNS = "{percentage:3.0f}%|{bar:20}| turn {n_fmt} of {total_fmt}, {elapsed}: {desc}"
TIME = "measuring {percentage:3.0f}%|{bar:20}| {elapsed}, at most {total_fmt} s: {desc}"


def _quiet(doing: str, done: int = 0, expect: int = 0) -> None:
    """Show nothing."""


@contextlib.contextmanager
def turn_bar(wanted: bool | None) -> Iterator[ProgressCallback]:
    """A bar on stderr where wanted, or where that is a terminal and nobody said; else nothing is shown."""
    if not (is_terminal(sys.stderr) if wanted is None else wanted):
        yield _quiet
        return
    from tqdm import tqdm

    with tqdm(total=0, bar_format=PREPARING, leave=False, file=sys.stderr, dynamic_ncols=True) as bar:
        yield _shown_on(bar)


def _shown_on(bar: Any) -> ProgressCallback:
    """Words alone before the number of turns is known. Then that is the total, whatever is measured again."""

    def show(doing: str, done: int = 0, expect: int = 0) -> None:
        if expect:
            bar.total, bar.n, bar.bar_format = expect, 0, TURNS
        if doing:
            bar.set_description_str(doing, refresh=False)
        bar.n = min(bar.n + done, bar.total)
        bar.refresh()

    return show


@contextlib.contextmanager
def time_bar(total_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[ProgressCallback]:
    """A bar of the time that has passed, from the first thing that is done on, where stderr is a terminal; it never
    gets longer, whatever is measured again."""
    if not is_terminal(sys.stderr):
        yield _quiet
        return
    bars: list[Any] = []
    started: list[float] = []

    def show(doing: str, done: int = 0, expect: int = 0) -> None:
        if not bars:
            from tqdm import tqdm

            started.append(clock())
            bars.append(tqdm(total=round(total_s), bar_format=TIME, leave=False, file=sys.stderr, dynamic_ncols=True))
        bar = bars[0]
        if doing:
            bar.set_description_str(doing, refresh=False)
        bar.n = min(int(clock() - started[0]), bar.total)
        bar.refresh()

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
