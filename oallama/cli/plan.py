"""`oallama plan`: plan a placement and write it to a file."""

from __future__ import annotations

import click

from oallama.cli import options as shared
from oallama.cli.help import Command
from oallama.cli.output import busy, emit, emit_json, log, wrapped
from oallama.cli.policy import PolicyOptions, note_unused, policy_options
from oallama.cli.projector import ProjectorOptions, projector_options
from oallama.cli.speculation import StepOptions, step_options
from oallama.core.options import Options


@click.command("plan", cls=Command)
@shared.model_argument
@policy_options
@shared.gathered(*shared.PLACEMENT, *shared.WORKLOAD, shared.ubatch_option, *shared.ATTENTION)
@shared.depth_option
@step_options
@shared.profile_option
@projector_options
@shared.json_option
@shared.output_option("the plan as JSON")
def command(
    model: str,
    policy: PolicyOptions,
    options: Options,
    n_prompt: int,
    n_gen: int,
    n_depth: int | None,
    step: StepOptions,
    profile: str | None,
    pictures: ProjectorOptions,
    as_json: bool,
    output: str | None,
) -> None:
    """Plan where each operator is stored and computed. -o writes the plan to a file for `oallama run --plan FILE`.

    \b
      oallama plan model.gguf
      oallama plan model.gguf --policy oato --vram 6GiB -o plan.json

    \f
    The plan is verified by a no_alloc load of the model. Fractions of an operator: gg is on the device, cg streamed to
    it, cc on the CPU; they add up to 1.
    """
    from oallama.placer import Placer
    from oallama.report.plan import plan_sentences

    placer = Placer.of_file(model, options, profile)
    note_unused(placer, policy)
    workload = step.workload(placer.workload(n_prompt, n_gen, n_past=n_depth or 0))
    placer = pictures.with_room(placer, workload)
    with busy("planning"):
        plan = step.plan(placer, workload, policy.plan)
    if (projector := pictures.placed(plan, memory_kept=True)) is not None:
        plan = projector.noted(plan)
    if output is not None:
        plan.save(output)
        log(f"wrote {output}")
    if as_json:
        emit_json(plan.to_json())
    for sentence in plan_sentences(plan, placer.operators):
        if output is None and not as_json:
            emit(wrapped(sentence))
        else:
            log(wrapped(sentence))
