"""`oallama tune`: measure the machine and the best plans now, as `run` does after its first answer."""

from __future__ import annotations

import click

from oallama.cli import options as shared
from oallama.cli.help import Command, Group, option
from oallama.cli.output import busy, emit_json, log
from oallama.cli.records import count
from oallama.cli.speculation import StepOptions, draft_options
from oallama.cli.tuning import continued_later, tune_and_tell
from oallama.core.errors import UsageError
from oallama.core.options import Options


@click.command("tune", cls=Command)
@shared.model_argument
@shared.gathered(*shared.PLACEMENT, *shared.CONTEXT, shared.late_option)
@option(
    "-p", "--n-prompt", type=count(1), metavar="N_PROMPT", group=Group.WORKLOAD, show_default="all classes",
    help="Tune only for the class of prompts of this length; with -d, after a history.",
)  # fmt: skip
@shared.depth_option
@draft_options
@shared.profile_option
@option(
    "--time", "seconds", type=count(1, 86_400), metavar="SECONDS", show_default="until a result is clear",
    group=Group.PLACEMENT,
    help="Time limit for comparing plans.\f Timing the machine is extra.",
)  # fmt: skip
@shared.retune_option
@shared.json_option
def command(
    model: str,
    options: Options,
    n_prompt: int | None,
    n_depth: int | None,
    step: StepOptions,
    profile: str | None,
    seconds: int | None,
    retune: bool,
    as_json: bool,
) -> None:
    """Time this machine, compare the best plans with the fastest options of llama.cpp, and keep the result.

    \b
      oallama tune model.gguf
      oallama tune model.gguf --device CUDA0 -c 8192

    \f
    Tunes for short questions (prompts of up to 128 tokens), pages (up to 1,024) and long documents, each in an empty
    context and with half of it filled; run, chat and serve use the result of the nearest class. If earlier runs took
    other times than predicted, plans use the measured times. Results are kept if Ctrl-C or the time limit ends tuning.
    """
    from oallama.placer import Placer
    from oallama.placer.tuned import in_tuned_context
    from oallama.tuned.classes import class_of, classes_in

    with busy("planning"):
        placer = Placer.of_file(model, options, profile)
        if not placer.has_device:
            raise UsageError(
                "no GPU found, so there is nothing to tune: `oallama profile` times the CPU; give --device NAME, "
                "e.g. emulated:rtx3060"
            )
        if step.spec == "ngram":
            raise UsageError("--spec ngram is not tuned: how often text repeats depends on the text; leave it out")
        placer.drafter = step.drafter(placer)
        corrected = placer.adopt_history()
    if corrected:
        log(f"oallama: planning again with the times of earlier runs: {corrected}")
    workload = in_tuned_context(placer, placer.workload(n_prompt or 1, 0, n_past=n_depth or 0))
    classes = classes_in(workload.n_ctx) if n_prompt is None and n_depth is None else (class_of(workload),)
    refresh, ends = retune or bool(corrected), "Ctrl-C stops and keeps the results so far"
    with continued_later(placer, workload):
        tuning = tune_and_tell(placer, workload, classes, seconds, refresh=refresh, ends=ends)
    if as_json:
        emit_json({**tuning.result.document, "remembered": tuning.remembered})
