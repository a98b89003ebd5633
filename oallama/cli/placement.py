"""Where the weights of a run or of a chat go: by a plan of a file, by a policy that was asked for, or past the gate."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from oallama.cli.gate import at_once, gated
from oallama.cli.output import talk
from oallama.cli.policy import PolicyOptions
from oallama.core.options import Options
from oallama.core.types import StreamSettings, Workload

if TYPE_CHECKING:
    from oallama.device.emulated import Emulated
    from oallama.placer import Placer
    from oallama.plan.plan import Plan


def planned(
    model: str | None, plan_file: str, policy: PolicyOptions, options: Options, profile: str | None
) -> tuple[Placer, Plan]:
    """The plan of a file, and a placer for its model on its device, where no others are asked for."""
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

    plan = Plan.load(plan_file)
    if policy.prefetch is not None:
        streaming = replace(plan.record.streaming or StreamSettings(), prefetch=policy.prefetch)
        plan = Plan(replace(plan.record, streaming=streaming))
    options = replace(options, device=options.device or plan.device)
    return Placer.of_file(model or plan.record.model_path, options, profile), plan


def run_workload(placer: Placer, n_prompt: int, n_gen: int) -> Workload:
    """The workload of this prompt; a context beyond the trained one is said."""
    load, trained = placer.workload(n_prompt, n_gen), placer.model.n_ctx_train
    if 0 < trained < load.n_ctx:
        talk(
            f"warning: a context of {load.n_ctx} tokens is longer than the {trained} that this model was trained on; "
            "what it writes behind them may make no sense"
        )
    return load


def made_plan(
    placer: Placer, policy: PolicyOptions, load: Workload, gate: bool, refresh_gate: bool, tune: str
) -> tuple[Plan, bool]:
    """The plan that the policy makes; `auto` passes the gate. And whether the gate is to measure after the answer."""
    if policy.keeps_to_cpu(placer):
        return placer.cpu_plan(**asdict(load)), False
    to_tune = False
    if not gate or not policy.is_auto:
        plan = policy.plan(placer, load)
    elif tune == "before" or refresh_gate:
        plan = gated(placer, load, refresh_gate)
    else:
        plan, unknown = at_once(placer, load)
        to_tune = unknown and tune == "after"
    for note in plan.record.notes:
        talk(f"note: {note}")
    return plan, to_tune


def without_meaning(emulated: Emulated) -> str:
    """What of a run on an emulated device says nothing."""
    if emulated.values == "drawn":
        return "the device is emulated and computes nothing (values=drawn): the text is noise"
    return "the device is emulated and computes on the CPU (values=real): its times mean nothing, those of `bench` do"
