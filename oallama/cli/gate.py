"""The gate as `oallama run` shows it: why it measures and how long, a bar meanwhile, then its verdict in one line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from oallama.cli.bars import time_bar
from oallama.cli.keys import ended_by_key
from oallama.cli.output import talk
from oallama.core.errors import OallamaError

if TYPE_CHECKING:
    from oallama.bench.ab import ProgressCallback
    from oallama.core.types import Workload
    from oallama.gate.run import Gated
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

PROFILE_S, MEASURE_S = 100.0, 120.0
"""Given after an answer to the profile of a machine that is not known yet, and to plans; what is left is measured after
the next."""


def gated(placer: Placer, load: Workload, refresh: bool = False) -> Plan:
    """The plan that the gate lets through, with its verdict told in a line."""
    return measured(placer, load, None, refresh).plan


def measured(
    placer: Placer,
    load: Workload,
    budget_s: float | None,
    refresh: bool = False,
    aside: str | None = "--no-gate skips it",
) -> Gated:
    """Call gated_plan, with a line before it measures and one with its verdict. budget_s None: the seconds that are
    predicted to settle it. aside: how to do without; None: the caller has said that it measures."""
    from oallama.gate.run import gated_plan

    with contextlib.ExitStack() as stack:
        shown: list[ProgressCallback] = []

        def begin(seconds: float) -> None:
            if aside is not None:
                talk(
                    "oallama: measuring the best plan against stock llama.cpp, so that none is used that is slower: "
                    f"about {seconds:.0f} s, once for this model, device and context ({aside})"
                )
            shown.append(stack.enter_context(time_bar(seconds)))

        def progress(doing: str, done: int = 0, expect: int = 0) -> None:
            for bar in shown:
                bar(doing, done, expect)

        found = gated_plan(placer, load, progress=progress, refresh=refresh, begin=begin, budget_s=budget_s)
    tell(placer, found)
    return found


def at_once(placer: Placer, load: Workload) -> tuple[Plan, bool]:
    """A plan without measuring: what the gate lets through where it knows, else stock llama.cpp's own placement; and
    whether there is something to measure then."""
    from oallama.gate.run import remembered, stock_at_once

    found = remembered(placer, load)
    if found is None:
        return stock_at_once(placer, load), True
    tell(placer, found)
    return found.plan, False


def tune_after(placer: Placer, load: Workload) -> None:
    """Measure for the next run, until a key is typed. The answer is there, so neither that nor a failure is one of the
    run."""
    try:
        seconds = MEASURE_S if placer.known_profile is not None else MEASURE_S + PROFILE_S
        talk(
            f"oallama: measuring {seconds:.0f} s at most so that the next run is faster; any key ends it and keeps "
            "what is done"
        )
        with ended_by_key(seconds):
            measured(placer, load, None, aside=None)
    except KeyboardInterrupt:
        talk("oallama: measuring has ended; the next run or `oallama tune` goes on from here")
    except (OallamaError, OSError) as error:
        talk(f"warning: the next run uses stock llama.cpp's placement too, as measuring failed: {error}")


def tuning_gain(placer: Placer, load: Workload, stock: Plan) -> str:
    """Return a line with the most that tuning is predicted to gain over stock llama.cpp's placement, and how to tune.
    Measures and plans nothing."""
    from oallama.place.bound import physical_bound
    from oallama.report.expected import gain_text

    now = best = None
    with contextlib.suppress(OallamaError):  # no answer needs a prediction
        if placer.known_profile is not None:
            now = placer.simulate(stock, load).predicted
            best = physical_bound(placer.problem_for(stock), load, stock.memory)
    how = f"`oallama tune {placer.model.path}`, or --tune before"
    return f"this is stock llama.cpp's own placement; {gain_text(now, best)}: {how}"


def tell(placer: Placer, found: Gated) -> None:
    """Say the verdict; where it is not settled, also what to type."""
    hint = "" if found.verdict.settled else f": `oallama tune {placer.model.path}` goes on and makes sure"
    talk(f"oallama: {found.verdict.sentence}{hint}")
