"""`oallama export`: a plan for programs other than ours."""

from __future__ import annotations

import click

from oallama.cli.options import output_option
from oallama.cli.output import emit, talk, write_file
from oallama.core.errors import PlanError, UsageError

TARGETS = ("llama-server", "llama-cli", "plugin")


@click.command("export", short_help="Turn a plan into a command line of stock llama.cpp.")
@click.argument("plan_file", metavar="PLAN", type=click.Path())
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="What to write the plan for.")
@output_option("the command line")
def command(plan_file: str, target: str, output: str | None) -> None:
    """Turn a plan (from `oallama plan -o PLAN`) into the shell-quoted command line that makes stock llama.cpp place the
    model in the same way.
    """
    from oallama.placer import Placer
    from oallama.plan.export import export_command
    from oallama.plan.plan import Plan

    if target == "plugin":
        raise UsageError("export --to plugin comes with the split backend; use llama-server or llama-cli")
    plan = Plan.load(plan_file)
    placer = Placer.load(plan.record.model_path, device="none")
    plan.check(placer.model, placer.operators)
    if any(0 < part < 1 for o in plan.operators for part in (o.gg, o.cg, o.cc)) or any(o.cg for o in plan.operators):
        raise PlanError(
            "the plan splits or streams operators, which stock llama.cpp cannot do; plan with --policy oato"
        )
    line = export_command(plan, placer.operators, placer.tensor_names, target)  # type: ignore[arg-type]
    if output is None:
        emit(line)
        return
    write_file(output, line + "\n")
    talk(f"wrote {output}")
