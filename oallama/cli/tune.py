"""`oallama tune`: measure the machine and the best plans now, which `run` otherwise does after its first answer."""

from __future__ import annotations

from dataclasses import asdict

import click

from oallama.cli.gate import measured
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
from oallama.cli.output import emit_json, talk
from oallama.core.errors import UsageError
from oallama.core.options import Options

DEFAULT_S = 120


@click.command("tune")
@model_argument
@gathered(*PLACEMENT, *WORKLOAD, ubatch_option, *ATTENTION)
@depth_option
@profile_option
@click.option(
    "--time", "seconds", type=count(1, 86_400), default=DEFAULT_S, show_default=True, metavar="SECONDS",
    help="For plans against stock llama.cpp, at most; the profile of the machine takes what it takes.",
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
    seconds: int,
    refresh_gate: bool,
    as_json: bool,
) -> None:
    """Measure this machine with the model, then the best plans against stock llama.cpp, and remember which one to use
    for prompts and generations of about these lengths. Where runs took longer or shorter than predicted, plans follow
    from what they took. What is measured is kept also where Ctrl-C or the time ends it.

    \b
      oallama tune model.gguf
      oallama tune model.gguf --device CUDA0 -p 4000 -n 200 -c 8192
    """
    from oallama.gate.verdict import sentence
    from oallama.placer import Placer

    placer = Placer.of_file(model, options, profile)
    if not placer.has_device:
        raise UsageError("there is nothing to tune without a device; name one with --device, such as emulated:rtx3060")
    load = placer.workload(n_prompt, n_gen, n_past=n_depth or 0)
    if corrected := placer.adopt_history():
        talk(f"oallama: planning anew by what runs took: {corrected}")
    found = measured(
        placer,
        load,
        float(seconds),
        refresh_gate or bool(corrected),
        accept_near=False,
        aside="Ctrl-C ends it and keeps what is done",
    )
    if as_json:
        text = sentence(found.verdict).removeprefix("oallama: ")
        emit_json({**asdict(found.verdict), "said": text, "remembered": found.remembered})
