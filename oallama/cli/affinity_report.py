"""`oallama affinity-report`: each operator's GPU affinity and placement, with the reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from oallama.cli import options as shared
from oallama.cli.help import Command, Group, option
from oallama.cli.output import busy, deliver, emit_json, json_text, tables_text
from oallama.cli.policy import PolicyName, PolicyOptions, note_unused, rules_options
from oallama.cli.speculation import StepOptions, parallel_option

if TYPE_CHECKING:
    from oallama.core.options import Options
    from oallama.core.types import Phase, Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.report.operators import AffinityReport

FORMATS = ("table", "json", "html")


@click.command("affinity-report", cls=Command)
@shared.model_argument
@shared.gathered(*shared.PLACEMENT, *shared.WORKLOAD)
@option(
    "--phase",
    type=click.Choice(["decode", "prefill", "mixed"]),
    default="decode",
    show_default=True,
    metavar="PHASE",
    group=Group.WORKLOAD,
    help="Rank by the time of a token (decode), of the prompt (prefill), or of the whole run (mixed).",
)
@option(
    "--policy",
    type=PolicyName(),
    metavar="POLICY",
    group=Group.PLACEMENT,
    help="Show the plan that `oallama run --policy POLICY` loads.\f auto: the fastest by prediction, whatever tuning "
    "found. Default: OATO's search for the phase.",
)
@rules_options
@parallel_option
@shared.profile_option
@option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    metavar="FORM",
    help="table (default), json or html.\f If omitted, the suffix of -o decides.",
)
@shared.json_option
@option("--all", "every_row", is_flag=True, help="Print one line per operator.")
@shared.output_option("the report")
def command(
    model: str,
    options: Options,
    n_prompt: int,
    n_gen: int,
    phase: Any,
    policy: PolicyOptions,
    expected: int | None,
    profile: str | None,
    form: str | None,
    as_json: bool,
    every_row: bool,
    output: str | None,
) -> None:
    """Show where each operator goes and why: the time it saves per byte of device memory.

    \b
      oallama affinity-report model.gguf
      oallama affinity-report model.gguf --vram 6GiB -o report.html

    \f
    Ranks the model's operators by GPU affinity, (T_c - T_g - T') / bytes, fills the device in that order, and shows
    where each operator goes, the device's memory, and the predicted times. With --policy, shows that policy's plan. The
    html page is one self-contained file.
    """
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json cannot be combined with --format {form}", click.get_current_context())
    from oallama.placer import Placer
    from oallama.report.operators import report_document

    placer = Placer.of_file(model, options, profile)
    note_unused(placer, policy)
    with busy("planning"):
        report = report_of(placer, placer.workload(n_prompt, n_gen), phase, policy, expected)
    if as_json:
        emit_json(report_document(report))
    if output is not None or not as_json:
        deliver(render(report, form or format_of(output), every_row, output is None), output)


def report_of(
    placer: Placer, workload: Workload, phase: Phase, policy: PolicyOptions, expected: int | None
) -> AffinityReport:
    """Return the report of the requested plan, else of OATO's search and the plan that `oallama run` uses. expected:
    requests in flight."""
    from oallama.placer.report import plan_report, report_over, search_report, with_run
    from oallama.report.operators import PlanInUse

    workload = StepOptions(expected=expected).workload(workload)
    plan = policy.plan(placer, workload) if policy.policy is not None or expected is not None else None
    if placer.members:
        if plan is not None:
            return report_over(placer, plan, workload, phase)
        plan, is_measured = plan_of_run(placer, workload)
        return replace(report_over(placer, plan, workload, phase), run=PlanInUse(plan, is_measured))
    if plan is None:
        report = search_report(placer, phase, workload.n_prompt, workload.n_gen, policy.affinity, policy.fill)
    else:
        report = plan_report(placer, plan, workload, phase)
    return with_run(placer, report, *plan_of_run(placer, workload, plan if expected is not None else None))


def plan_of_run(placer: Placer, workload: Workload, new_plan: Plan | None = None) -> tuple[Plan, bool]:
    """Return the plan that `oallama run` uses for such a prompt, and whether it was measured; without a measured plan,
    the plan of policy auto, which tuning would measure. new_plan: a plan for several requests, used if no plan was
    measured."""
    from oallama.placer.tuned import in_tuned_context, tuned_plan

    if not placer.has_device:
        return placer.plan("cpu", workload=workload), False
    tuned = tuned_plan(placer, in_tuned_context(placer, workload)) if workload.step.n_parallel == 1 else None
    return (new_plan or placer.plan(workload=workload), False) if tuned is None else (tuned.plan, True)


def format_of(output: str | None) -> str:
    """Return the format of a file name's suffix, else `table`."""
    suffix = PurePath(output).suffix.lower().lstrip(".") if output else ""
    return suffix if suffix in FORMATS else "table"


def render(report: AffinityReport, form: str, every_row: bool, on_stdout: bool) -> str:
    from oallama.report.html import affinity_html
    from oallama.report.operators import report_document, report_tables

    if form == "json":
        return json_text(report_document(report))
    if form == "html":
        return affinity_html(report)
    return tables_text(report_tables(report, every_row), coloured=on_stdout)
