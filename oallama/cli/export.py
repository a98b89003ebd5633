"""`oallama export`: a plan for programs other than ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oallama.cli.help import Command, option
from oallama.cli.options import output_option
from oallama.cli.output import deliver, talk
from oallama.core.errors import PlanError
from oallama.device.spec import parse_device

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.plan.export import Plugin
    from oallama.plan.plan import Plan

PLUGIN = "plugin"
TARGETS = ("llama-server", "llama-cli", "llama-bench", PLUGIN)
PLUGIN_PLAN_SUFFIX = ".oallama"


@click.command("export", cls=Command)
@click.argument("plan_file", metavar="PLAN", type=click.Path())
@option("--to", "target", type=click.Choice(TARGETS), required=True, help="What to write the plan for.")
@option(
    "--plugin-plan",
    type=click.Path(),
    metavar="FILE",
    show_default=f"PLAN with the ending {PLUGIN_PLAN_SUFFIX}",
    help="The file that `--to plugin` wrote, for a plan that splits operators.",
)
@output_option("the command line or the plugin's plan")
def command(plan_file: str, target: str, plugin_plan: str | None, output: str | None) -> None:
    """Turn a plan (from `oallama plan -o PLAN`) into the shell-quoted command line that makes stock llama.cpp place the
    model in the same way.

    A plan that splits operators runs there too, in the plugin libggml-oallama. It reads a plan file of its own, so
    export twice:

    \b
    oallama export plan.json --to plugin -o plan.oallama
    oallama export plan.json --to llama-server
    """
    from oallama.device.layouts import needs_no_repack
    from oallama.placer import Placer
    from oallama.plan.export import export_command, splits
    from oallama.plan.plan import Plan

    plan = Plan.load(plan_file)
    placer = Placer.load(plan.model_path, device="none")
    plan.check(placer.model, placer.operators)
    if target == PLUGIN:
        text = _plugin_text(plan, placer)
    else:
        default = Path(plan_file).with_suffix(PLUGIN_PLAN_SUFFIX)
        plugin = (
            _plugin(plan, placer, plan_file, Path(plugin_plan or default)) if splits(plan, placer.operators) else None
        )
        plain = needs_no_repack(placer.operators)
        text = export_command(plan, placer.operators, placer.tensor_names, target, plugin, plain)  # type: ignore[arg-type]
        text += "\n"
        if (spec := parse_device(plan.device)).kind == "rpc":  # a plan of somebody else's may name any server
            talk(f"note: this command line sends the model's weights and prompts to {spec}")
    deliver(text, output)


def _plugin_text(plan: Plan, placer: Placer) -> str:
    from oallama.plan.export import splits, stock_device
    from oallama.plan.plugin_text import plugin_text

    if not splits(plan, placer.operators):
        raise PlanError(
            "the plan splits no operator, so stock llama.cpp runs it without the plugin; export it --to llama-server"
        )
    return plugin_text(plan, placer.operators, placer.model.n_layer, stock_device(plan))


def _plugin(plan: Plan, placer: Placer, plan_file: str, text_file: Path) -> Plugin:
    """The plugin's library and its plan file, which must be the one of this very plan."""
    from ggml_bridge.library import find_plugin
    from oallama.plan.export import Plugin

    expected = _plugin_text(plan, placer)
    try:
        found = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        found = ""
    if found != expected:
        fault = "is not the plugin's plan file of this plan" if found else "is missing"
        raise PlanError(
            f"the plan splits operators and {text_file}, which tells the plugin how, {fault}; write it first: "
            + shlex.join(["oallama", "export", plan_file, "--to", PLUGIN, "-o", str(text_file)])
        )
    return Plugin(str(find_plugin()), str(text_file.resolve()))
