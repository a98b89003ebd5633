"""`oallama tune`: measure the machine and the best plans now, which `run` otherwise does after its first answer."""

from __future__ import annotations

import click

from oallama.cli.gate import measured, tell_doubt
from oallama.cli.help import Command, Group, option
from oallama.cli.options import (
    ATTENTION,
    PLACEMENT,
    WORKLOAD,
    count,
    depth_option,
    gathered,
    json_option,
    model_argument,
    profile_option,
    refresh_gate_option,
    ubatch_option,
)
from oallama.cli.output import busy, emit_json, talk
from oallama.core.errors import UsageError
from oallama.core.options import Options


@click.command("tune", cls=Command)
@model_argument
@gathered(*PLACEMENT, *WORKLOAD, ubatch_option, *ATTENTION)
@depth_option
@profile_option
@option(
    "--time", "seconds", type=count(1, 86_400), metavar="SECONDS", show_default="as long as it takes to decide",
    group=Group.PLACEMENT,
    help="Time limit for comparing plans.\f Timing the machine comes on top.",
)  # fmt: skip
@refresh_gate_option
@json_option
def command(
    model: str,
    options: Options,
    n_prompt: int,
    n_gen: int,
    n_depth: int | None,
    profile: str | None,
    seconds: int | None,
    refresh_gate: bool,
    as_json: bool,
) -> None:
    """Time this machine, compare the best plans with llama.cpp's own placement, and remember which is fastest.

    \b
      oallama tune model.gguf
      oallama tune model.gguf --device CUDA0 -p 4000 -n 200 -c 8192

    \f
    The result is for prompts of up to 128 tokens, up to 1,024, or more. Plans use the measured times of earlier runs
    where these were not as predicted. Results are kept even where Ctrl-C or the time limit ends it.
    """
    from oallama.placer import Placer

    with busy("planning"):
        placer = Placer.of_file(model, options, profile)
        if not placer.has_device:
            raise UsageError("no GPU found, so there is nothing to tune; --device names one, such as emulated:rtx3060")
        load, corrected = placer.workload(n_prompt, n_gen, n_past=n_depth or 0), placer.adopt_history()
    if corrected:
        talk(f"oallama: planning anew with the times of earlier runs: {corrected}")
    found = measured(
        placer, load, seconds, refresh=refresh_gate or bool(corrected), ends="Ctrl-C ends it and keeps what is done"
    )
    tell_doubt(placer)
    if as_json:
        emit_json({**found.verdict.document, "remembered": found.remembered})
