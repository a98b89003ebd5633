"""`oallama export`: a plan for stock llama.cpp's programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from oallama.cli.help import Command, option
from oallama.cli.options import backend_option, output_option
from oallama.cli.output import deliver, log
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
@option("--to", "target", type=click.Choice(TARGETS), required=True, help="Target program.")
@backend_option
@output_option("the command line or the plugin's plan")
def command(plan_file: str, target: str, output: str | None) -> None:
    """Convert a plan (from `oallama plan -o PLAN`) to a shell-quoted command line, with which stock llama.cpp makes the
    same placement.

    Layouts of this CPU, and plans that split operators, need the plugin libggml-oallama, which the command line loads.
    The plugin reads the splits from a second file, written beside PLAN with the suffix .oallama; `--to plugin` prints
    it.
    """
    from oallama.placer import Placer
    from oallama.plan.export import export_command
    from oallama.plan.plan import Plan
    from oallama.run.stock_backend import stock_backend
    from oallama.run.weight_places import usable_plan

    plan = Plan.load(plan_file)
    placer = Placer.load(plan.model_path, device="none")
    plan.check(placer.model, placer.operators)
    usable, warnings = usable_plan(plan, placer.operators)
    for warning in warnings:
        log(f"warning: {warning}")
    if target == PLUGIN:
        text = _plugin_text(usable, placer)
    else:
        plugin = _plugin(usable, placer, plan_file, output, target)
        backend = stock_backend(plan.device)
        text = export_command(usable, placer.operators, placer.tensor_names, target, plugin, backend)  # type: ignore[arg-type]
        text += "\n"
        if (spec := parse_device(plan.device)).servers:  # a foreign plan may name any server
            log(f"note: this command line sends the model's weights and prompts to {spec}")
    deliver(text, output)


def _plugin_text(plan: Plan, placer: Placer) -> str:
    from oallama.plan.export import split_devices
    from oallama.plan.patterns import split_names
    from oallama.plan.plugin_text import plugin_text

    if not split_names(plan, placer.operators):
        raise PlanError("the plan splits no operator and needs no plan file; export it --to llama-server")
    return plugin_text(plan, placer.operators, placer.model.n_layer, split_devices(plan))


def _plugin(plan: Plan, placer: Placer, plan_file: str, output: str | None, target: str) -> Plugin | None:
    """Return the plugin's library and its plan file, which is written beside plan_file if the plan splits operators;
    None for a plan that stock llama.cpp runs without the plugin. Raises PlanError if that file is plan_file itself, or
    output, where the command line goes."""
    from ggml_bridge.library import find_plugin
    from oallama.plan.export import Plugin, needs_plugin
    from oallama.plan.patterns import split_names

    if not needs_plugin(plan, placer.operators, target):  # type: ignore[arg-type]
        return None
    if not split_names(plan, placer.operators):
        return Plugin(str(find_plugin()))
    text_file = Path(plan_file).with_suffix(PLUGIN_PLAN_SUFFIX).resolve()
    if text_file in [Path(name).resolve() for name in (plan_file, output) if name is not None]:
        raise PlanError(f"the plugin's plan would replace {text_file}; give PLAN and -o names with another suffix")
    deliver(_plugin_text(plan, placer), str(text_file))
    return Plugin(str(find_plugin()), str(text_file))
