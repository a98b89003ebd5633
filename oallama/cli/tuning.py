"""Shows tuning in `oallama run` and `oallama tune`: why and how long it measures, a progress bar, then the result."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from oallama.cli import options as shared
from oallama.cli.output import busy, log, time_bar
from oallama.cli.records import named_options
from oallama.cli.signals import asked_to_end, ended_by_key
from oallama.core.errors import OallamaError
from oallama.core.files import FOLDER_VARIABLE, cache_folder
from oallama.core.units import MIB

if TYPE_CHECKING:
    from oallama.bench.ab import ProgressCallback
    from oallama.core.types import Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.tune.run import TuneOutcome
    from oallama.tuned.classes import WorkloadClass
    from oallama.tuned.result import TuneResult

LONGEST_S = 600.0
"""Most predicted seconds of measuring after an answer. Above, the last line names the command instead."""

SECONDS_TOLD, MINUTES_TOLD = 100.0, 100  # longer is told in minutes, in hours


def tune_and_tell(
    placer: Placer,
    workload: Workload,
    classes: Sequence[WorkloadClass] | None = None,
    time_limit_s: float | None = None,
    most_s: float = math.inf,
    refresh: bool = False,
    ends: str = "--no-tuned skips it",
) -> TuneOutcome:
    """Call `tune`; print a line before it measures, and its result or how to continue. classes: None: the
    workload's class. ends: how to end or skip it."""
    from oallama.tune.run import tune
    from oallama.tuned.store import read_result

    shown: list[ProgressCallback] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(busy("planning"))  # until there is a bar

        def begin(_result: TuneResult, seconds: float) -> None:
            log(
                f"oallama: comparing plans with llama.cpp's options: about {minutes_text(seconds)}, once for this "
                f"model, device and context ({ends})"
            )
            tell_doubt(placer)
            shown.append(stack.enter_context(time_bar(seconds)))

        def progress(doing: str, done: int = 0, expect: int = 0) -> None:
            for bar in shown:
                bar(doing, done, expect)

        outcome = tune(placer, workload, classes, progress, begin, time_limit_s, most_s, refresh)
    for workload_class in (outcome.workload_class,) if classes is None else classes:
        if (result := outcome.result.of(workload_class)) is not None:
            log(f"oallama: {result.sentence}")
    if outcome.left_s:
        log(
            f"oallama: no clear result yet; continue ({minutes_text(outcome.left_s)}): {tune_command(placer, workload)}"
        )
    if read_result(outcome.result.key) is None:
        log(
            f"warning: the result cannot be saved, as {cache_folder()} is not writable; free some disk space, or set "
            f"{FOLDER_VARIABLE} to another folder"
        )
    return outcome


@contextlib.contextmanager
def continued_later(placer: Placer, workload: Workload) -> Iterator[None]:
    """Say how tuning goes on where the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        log(f"oallama: stopped; {tune_command(placer, workload)} continues from here")
        raise


def plan_without_measuring(placer: Placer, workload: Workload) -> tuple[Plan, bool]:
    """Return a plan without measuring: the plan measured for this class of workloads or the nearest, else stock
    llama.cpp's own placement; and whether tuning could then measure plans."""
    from oallama.placer.tuned import tuned_plan

    tuned = tuned_plan(placer, workload)
    if tuned is None:
        return fit_plan(placer, workload), True
    log(f"oallama: {tuned.sentence}")
    return tuned.plan, tuned.result.of != tuned.asked


def fit_plan(placer: Placer, workload: Workload) -> Plan:
    """Return the plan of stock llama.cpp's own placement, the safe choice without measurements."""
    return placer.plan("fit", workload=workload, measure=False)


def tune_after_answer(placer: Placer, workload: Workload) -> None:
    """Measure for the next run, until a key is typed. The answer is complete, so a key or a failure of tuning does not
    fail the run; a signal ends the command."""
    from oallama.placer.tuned import in_tuned_context

    workload = in_tuned_context(placer, workload)
    try:
        with continued_later(placer, workload), ended_by_key():
            log("oallama: tuning for the next run; press any key to stop and keep the results so far")
            tune_and_tell(placer, workload, most_s=LONGEST_S, ends="press any key to stop")
    except KeyboardInterrupt:
        if asked_to_end():
            raise
    except (OallamaError, OSError) as error:
        log(f"warning: tuning failed, so the next run also uses llama.cpp's placement: {error}")


def tuning_gain(placer: Placer, workload: Workload, stock: Plan) -> str:
    """Return a line with the gain that tuning is predicted to bring over stock llama.cpp's placement (the most possible
    if no plan is known), and how to tune; if another class's plan is used, only how. Neither measures nor plans."""
    from oallama.placer.tuned import in_tuned_context, tuned_plan
    from oallama.planner.explain import physical_bound
    from oallama.report.expected import gain_text
    from oallama.report.text import policy_on
    from oallama.tune.run import unsettled

    workload = in_tuned_context(placer, workload)
    now = best = None
    with contextlib.suppress(OallamaError):  # the prediction is optional
        if near := tuned_plan(placer, workload):
            use = f"using the plan for {near.result.of.name}, {policy_on(near.plan.policy, near.plan.device)}"
            return f"{use}; to tune for {near.asked.name}: {tune_command(placer, workload)}"
        if so_far := unsettled(placer, workload):
            result, left_s = so_far
            return f"{result.sentence}; confirm ({minutes_text(left_s)}): {tune_command(placer, workload)}"
        if placer.known_profile is not None:
            now = placer.price(stock, workload)
            if not placer.members:  # it is of one device
                best = physical_bound(placer.problem_for(stock), workload, stock.memory)
    gain, how = gain_text(now, best), f"{tune_command(placer, workload)}, or --tune before"
    return f"using llama.cpp's placement; {gain}. To measure: {how}"


def tell_doubt(placer: Placer) -> None:
    """Warn in one line if predicted times are doubtful, and why. Does not measure."""
    from oallama.profile.busy import doubt

    profile = placer.known_profile
    if profile is not None and (why := doubt(profile)):
        log(f"note: {why}")


def tune_command(placer: Placer, workload: Workload) -> str:
    """Return the command that tunes for workloads in this context, in backticks."""
    options, declared = placer.options, named_options(*shared.PLACEMENT, *shared.CONTEXT, shared.late_option)
    words = ["oallama", "tune", placer.model.path]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in ("n_ctx", "other_vram") and value not in (None, field.default):
            text = f"{value}"
            if field.name == "vram":
                text = ",".join(f"{n_bytes / MIB:g}MiB" for n_bytes in (value, *options.other_vram))
            words += [declared[field.name].opts[-1], *([] if value is True else [text])]
    if placer.drafter is not None:
        words += placer.drafter.flags
    if options.n_ctx is not None or workload.n_ctx != placer.workload(1, 0).n_ctx:
        words += ["-c", str(workload.n_ctx)]
    context = click.get_current_context(silent=True)
    if context is not None and (profile := context.params.get("profile")) is not None:  # results are of its times
        words += ["--profile", profile]
    return f"`{shlex.join(words)}`"


def minutes_text(seconds: float) -> str:
    """`70 s`, `17 min`, `3 h`."""
    if seconds < SECONDS_TOLD:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < MINUTES_TOLD else f"{math.ceil(minutes / 60)} h"
