"""The gate as `oallama run` shows it: why it measures and how long, a bar meanwhile, then its verdict in one line."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oallama.bench.ab import Progress, quiet
from oallama.cli.output import is_terminal, talk

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

BAR = "measuring {percentage:3.0f}%|{bar:20}| {elapsed}, at most {total_fmt} s: {desc}"


def gated(placer: Placer, load: Workload, refresh: bool = False) -> Plan:
    """The plan that the gate lets through, with its verdict told in a line."""
    from oallama.gate.run import BUDGET_S, gated_plan
    from oallama.gate.verdict import sentence

    def begin() -> None:
        talk(
            "oallama: measuring the best plans against stock llama.cpp, so that none is used that is slower: at most "
            f"about {BUDGET_S:.0f} s, once for this model, device and context (--no-gate skips it)"
        )

    with time_bar(BUDGET_S) as shown:
        found = gated_plan(placer, load, progress=shown, refresh=refresh, begin=begin)
    near = " (measured with another length of prompt or -n; --refresh-gate measures this one)" if found.near else ""
    talk(f"{sentence(found.verdict)}{near}")
    return found.plan


@contextlib.contextmanager
def time_bar(total_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """A bar of the time that has passed, from the first thing that is done on, where stderr is a terminal; it never
    gets longer, whatever is measured again."""
    if not is_terminal(sys.stderr):
        yield quiet
        return
    bars: list[Any] = []
    started: list[float] = []

    def show(doing: str, done: int = 0, expect: int = 0) -> None:
        if not bars:
            from tqdm import tqdm

            started.append(clock())
            bars.append(tqdm(total=round(total_s), bar_format=BAR, leave=False, file=sys.stderr, dynamic_ncols=True))
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
