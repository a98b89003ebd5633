"""`oallama simulate`: predict what CPU, GPU and copies do while a plan runs, on this or a described machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from oallama.cli import options as shared
from oallama.cli.help import Command, Group, option
from oallama.cli.model_file import model_file
from oallama.cli.output import busy, deliver, emit_json, json_text, show
from oallama.cli.policy import PolicyOptions
from oallama.cli.records import as_record, count, declared_options
from oallama.core.errors import UsageError
from oallama.device.machines import MACHINES, machine_of
from oallama.device.spec import device_for_plan

if TYPE_CHECKING:
    from oallama.core.options import Options
    from oallama.core.types import Workload
    from oallama.device.machines import Machine
    from oallama.placer import Placer
    from oallama.plan.plan import Plan


@click.command("simulate", cls=Command)
@click.argument("files", nargs=-1, metavar="MODEL|PLAN.json...", shell_complete=shared.complete_file)
@shared.model_option
@option(
    "--machine", metavar="NAME|FILE.json", group=Group.DEVICE, show_default="this machine, as measured",
    help=f"{', '.join(MACHINES)}, or a file.\f The machine need not be present; docs/what-if.md says what a file "
    "describes.",
)  # fmt: skip
@as_record("policy", PolicyOptions, *declared_options(PolicyOptions, "policy", "prefetch"))
@option(
    "-p", "--n-prompt", type=count(1), metavar="N_PROMPT", group=Group.WORKLOAD, show_default="the plan's, else 512",
    help="Tokens of the prompt.",
)  # fmt: skip
@option(
    "-n", "--n-gen", type=count(0), metavar="N_GEN", group=Group.WORKLOAD, show_default="the plan's, else 128",
    help="Tokens to generate.",
)  # fmt: skip
@option(
    "-d", "--n-depth", type=count(0), metavar="N", group=Group.WORKLOAD, advanced=True,
    show_default="the plan's, else 0", help="Tokens in the KV cache before the prompt.",
)  # fmt: skip
@shared.gathered(*shared.PLACEMENT, shared.context_option)
@shared.profile_option
@shared.json_option
@shared.output_option("a JSON trace for ui.perfetto.dev, or if FILE ends in .svg a picture of the streams,")
def command(
    files: tuple[str, ...],
    model_option: str | None,
    machine: str | None,
    policy: PolicyOptions,
    n_prompt: int | None,
    n_gen: int | None,
    n_depth: int | None,
    options: Options,
    profile: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Predict what CPU, GPU and the copies between them do while a plan runs. Nothing is run.

    \b
      oallama simulate model.gguf --machine pc-12gb
      oallama simulate plan.json -o trace.json
      oallama simulate plan.json -o streams.svg

    \f
    Shows the predicted time of a prompt and of a token, how busy the four streams are, and which parts take the time.
    PLAN.json is from `oallama plan`, and names its model; for a MODEL, --policy makes the plan. The timeline is the one
    that the planner uses, with this machine's measured times or the described rates of another machine.
    """
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.report.simulate import simulate_document, simulate_svg, simulate_tables

    model, plan_path = _model_and_plan(files, model_option)
    if plan_path is not None and policy != PolicyOptions():
        raise UsageError("a plan cannot be combined with --policy or --prefetch; omit these or the plan")
    other_machine = None if machine is None else machine_of(machine)
    if other_machine is not None:
        if options.device is not None or profile is not None:
            raise UsageError("--machine includes its device and times; omit --device and --profile")
        options = replace(options, device="none")
    plan = None if plan_path is None else Plan.load(plan_path)
    if plan is not None and other_machine is None:
        options = replace(options, device=device_for_plan(options.device, plan.device))
    placer = Placer.of_file(plan.model_path if model is None and plan else model_file(model or ""), options, profile)
    if plan is not None:
        plan.check(placer.model, placer.operators)
        workload = _workload(placer, plan, n_prompt, n_gen, n_depth, options.n_ctx)
    else:
        workload = placer.workload(n_prompt or 512, 128 if n_gen is None else n_gen, n_past=n_depth or 0)
        with busy("planning"):
            plan = _plan_of_policy(placer, workload, policy, other_machine)
        workload = plan.workload
    simulated = (placer.model, plan, other_machine, placer.simulate(plan, workload, other_machine))
    if output is not None:
        is_svg = output.lower().endswith(".svg")
        deliver(simulate_svg(*simulated) if is_svg else json_text(simulate_document(*simulated)), output)
    if as_json:
        emit_json(simulate_document(*simulated))
    else:
        show(simulate_tables(*simulated))


def _model_and_plan(files: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    """Return (MODEL, PLAN), None for a missing one. Raises UsageError if both are missing or one is given twice."""
    plans = [file for file in files if file.endswith(".json")]
    models = [file for file in (*files, model) if file is not None and file not in plans]
    if len(plans) > 1 or len(models) > 1 or not plans + models:
        raise UsageError("give a model, a plan (.json from `oallama plan`), or a model and its plan")
    return models[0] if models else None, plans[0] if plans else None


def _plan_of_policy(placer: Placer, workload: Workload, policy: PolicyOptions, machine: Machine | None) -> Plan:
    if machine is None:
        return policy.plan(placer, workload)
    from oallama.placer.described import plan_for

    return plan_for(placer, machine, workload, policy.policy, policy.prefetch)


def _workload(
    placer: Placer, plan: Plan, n_prompt: int | None, n_gen: int | None, n_depth: int | None, n_ctx: int | None
) -> Workload:
    """Return the plan's workload with requested values replaced."""
    workload = plan.workload
    lengths = (n_prompt or workload.n_prompt, workload.n_gen if n_gen is None else n_gen)
    n_past = workload.n_past if n_depth is None else n_depth
    if n_ctx is None and n_past + sum(lengths) <= workload.n_ctx:
        n_ctx = workload.n_ctx
    return placer.workload(*lengths, n_ctx, workload.n_ubatch, n_past)
