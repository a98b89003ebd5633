"""`oallama plan`: decide a placement and write it down."""

from __future__ import annotations

from typing import Any

import click

from oallama.cli.options import (
    PlacementOptions,
    WorkloadOptions,
    attention_options,
    model_argument,
    output_option,
    placement_options,
    profile_option,
    ubatch_option,
    workload_options,
)
from oallama.cli.output import emit_json, talk
from oallama.cli.policy import PolicyOptions, policy_options


@click.command("plan", short_help="Decide the placement and write it as JSON.")
@model_argument
@policy_options
@placement_options
@workload_options
@ubatch_option
@attention_options
@profile_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan also where -o writes it.")
@output_option("the plan")
def command(
    model: str,
    policy: PolicyOptions,
    placement: PlacementOptions,
    workload: WorkloadOptions,
    n_ubatch: int | None,
    attention: dict[str, Any],
    profile: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Decide where every operator is stored and computed, check it against a dry load of the model, and print the plan
    as JSON (or write it with -o). `oallama run --plan FILE` uses it.

    Fractions of an operator: gg on the device, cg streamed to it, cc on the CPU; they add up to 1.
    """
    from oallama.report.plan import plan_sentences

    placer = placement.load(model, profile, attention=attention)
    plan = policy.plan(placer, workload.n_prompt, workload.n_gen, workload.n_ctx, n_ubatch)
    if output is not None:
        plan.save(output)
        talk(f"wrote {output}")
    if output is None or as_json:
        emit_json(plan.to_json())
    for sentence in plan_sentences(plan.record, placer.operators):
        talk(sentence)
