"""`oallama plan`: decide a placement and write it down."""

from __future__ import annotations

import click

from oallama.cli.help import Command, option
from oallama.cli.options import (
    ATTENTION,
    PLACEMENT,
    WORKLOAD,
    depth_option,
    gathered,
    model_argument,
    output_option,
    profile_option,
    ubatch_option,
    verbose_option,
)
from oallama.cli.output import busy, emit_json, talk
from oallama.cli.policy import PolicyOptions, note_unused, policy_options
from oallama.cli.projector import ProjectorOptions, projector_options
from oallama.core.options import Options


@click.command("plan", cls=Command)
@model_argument
@policy_options
@gathered(*PLACEMENT, *WORKLOAD, ubatch_option, *ATTENTION)
@depth_option
@profile_option
@projector_options
@option("--json", "as_json", is_flag=True, advanced=True, help="Print the plan also where -o writes it.")
@output_option("the plan")
@verbose_option
def command(
    model: str,
    policy: PolicyOptions,
    options: Options,
    n_prompt: int,
    n_gen: int,
    n_depth: int | None,
    profile: str | None,
    pictures: ProjectorOptions,
    as_json: bool,
    output: str | None,
    verbose: bool,
) -> None:
    """Decide where every operator is stored and computed, and print that as JSON. `oallama run --plan FILE` uses it.

    \b
      oallama plan model.gguf -o plan.json
      oallama plan model.gguf --policy oato --vram 6GiB -o plan.json

    \f
    The plan is checked against a dry load of the model. Fractions of an operator: gg on the device, cg streamed to it,
    cc on the CPU; they add up to 1.
    """
    from oallama.placer import Placer
    from oallama.report.plan import plan_sentences
    from oallama.report.text import PAPERS, PLAIN

    placer = Placer.of_file(model, options, profile)
    note_unused(placer, policy)
    load = placer.workload(n_prompt, n_gen, n_past=n_depth or 0)
    if (roomy := pictures.keeping_room(placer, load)) != placer.options:
        placer = Placer.of_file(model, roomy, profile)
    with busy("planning"):
        plan = policy.plan(placer, load)
    if (projector := pictures.read()) is not None:
        plan = pictures.place(projector, plan, memory_kept=True).noted(plan)
    if output is not None:
        plan.save(output)
        talk(f"wrote {output}")
    if output is None or as_json:
        emit_json(plan.to_json())
    for sentence in plan_sentences(plan, placer.operators, PAPERS if verbose else PLAIN):
        talk(sentence)
