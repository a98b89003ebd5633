"""The bar of `oallama bench`: what is being measured and how long that will still take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from oallama.bench.ab import Progress, quiet
from oallama.cli.output import is_terminal

PREPARING = "{elapsed} {desc}"
MEASURING = "{percentage:3.0f}%|{bar:20}| turn {n_fmt} of {total_fmt}, {elapsed}: {desc}"


@contextlib.contextmanager
def bench_progress(wanted: bool | None) -> Iterator[Progress]:
    """A bar on stderr where wanted, or where that is a terminal and nobody said; else nothing is shown."""
    if not (is_terminal(sys.stderr) if wanted is None else wanted):
        yield quiet
        return
    from tqdm import tqdm

    with tqdm(total=0, bar_format=PREPARING, leave=False, file=sys.stderr, dynamic_ncols=True) as bar:
        yield _shown_on(bar)


def _shown_on(bar: Any) -> Progress:
    """Words alone before the number of turns is known. Then that is the total, whatever is measured again."""

    def show(doing: str, done: int = 0, expect: int = 0) -> None:
        if expect:
            bar.total, bar.n, bar.bar_format = expect, 0, MEASURING
        if doing:
            bar.set_description_str(doing, refresh=False)
        bar.n = min(bar.n + done, bar.total)
        bar.refresh()

    return show
