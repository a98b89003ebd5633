"""`oallama tune`: measure the machine and the best plans now, which `run` otherwise does after its first answer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ggml_bridge.child import python_module
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


def tune_command(
    model: str, options: Options, n_prompt: int, n_gen: int, profile: str | None, n_past: int = 0
) -> tuple[str, ...]:
    """`oallama tune`, as a process of its own, for what these options place."""
    asked = {
        "--device": options.device, "--vram": options.vram and f"{options.vram}B", "--vram-fill": options.vram_fill,
        "--gpu-weights": options.gpu_weights, "-t": options.threads, "-c": options.n_ctx, "-ub": options.n_ubatch,
        "-ctk": options.type_k, "-ctv": options.type_v, "-fa": options.flash_attn, "-p": n_prompt, "-n": n_gen,
        "--profile": profile, "-d": n_past or None,
    }  # fmt: skip
    return (
        *python_module("oallama"), "tune", "-m", str(Path(model).absolute()),
        *(word for option, value in asked.items() if value is not None for word in (option, str(value))),
    )  # fmt: skip
