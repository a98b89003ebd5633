"""The bar of `oallama bench`: what is being measured and how long that will still take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from oallama.bench.ab import Progress, quiet
from oallama.cli.output import is_terminal


@contextlib.contextmanager
def bench_progress(wanted: bool | None) -> Iterator[Progress]:
    """A bar on stderr where wanted, or where that is a terminal and nobody said; else nothing is shown."""
    if not (is_terminal(sys.stderr) if wanted is None else wanted):
        yield quiet
        return
    from tqdm import tqdm

    # the bar's own estimate is of no use before all is loaded: turns take longer than steps of preparation
    with tqdm(total=0, unit="turn", leave=False, file=sys.stderr, dynamic_ncols=True) as bar:
        yield _shown_on(bar)


def _shown_on(bar: Any) -> Progress:
    def show(doing: str, done: int = 0, expect: int = 0) -> None:
        if expect:
            bar.total = (bar.total or 0) + expect
        if done and bar.n + done > bar.total:  # blocks that are measured again
            bar.total = bar.n + done
        if doing:
            bar.set_description_str(doing, refresh=False)
        bar.update(done)
        bar.refresh()

    return show
