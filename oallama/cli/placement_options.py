"""Placement of a run or a chat: from a plan file, a requested policy, or what tuning found."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oallama.cli import options as shared
from oallama.cli.adapters import check_adapters, placer_beside_adapters
from oallama.cli.help import Group, option, passed_options
from oallama.cli.output import busy, log
from oallama.cli.policy import PolicyOptions, note_planned, note_unused, policy_options
from oallama.cli.projector import NO_PICTURES, ProjectorOptions
from oallama.cli.records import Decorator, as_record
from oallama.cli.routing import counting
from oallama.cli.signals import is_interactive
from oallama.cli.speculation import StepOptions, step_options
from oallama.cli.tuning import continued_later, fit_plan, plan_without_measuring, tune_and_tell
from oallama.core.errors import OallamaError, UsageError
from oallama.core.options import Options
from oallama.core.types import Workload
from oallama.device.spec import device_for_plan
from oallama.stores.default_model import FILE, default_model

if TYPE_CHECKING:
    from oallama.cli.sampling import AnswerOptions
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.run.answer import Generation
    from oallama.run.engine import Engine

NOTE = f"note: no model given; using the built-in story model ({FILE})"


@dataclass(frozen=True, slots=True)
class Planned:
    """A model and its plan. workload: the requested one. is_untuned: the plan is stock llama.cpp's own placement,
    because no plan was measured yet."""

    placer: Placer
    plan: Plan
    workload: Workload
    is_untuned: bool


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The placement options of a command line. Raises UsageError for options that cannot be combined."""

    plan_file: str | None
    policy: PolicyOptions
    options: Options
    profile: str | None
    tuned: bool  # for policy auto: use what tuning found
    tune: str
    step: StepOptions = field(default_factory=StepOptions)

    def __post_init__(self) -> None:
        if self.plan_file is not None and (self.policy, self.step) != (PolicyOptions(), StepOptions()):
            raise UsageError(
                "--plan cannot be combined with --policy, -ngl, --affinity, --fill, --prefetch, --spec, --model-draft "
                "or --expect-parallel: the plan file sets them"
            )

    def expecting(self, slots: int) -> PlacementOptions:
        """Return these options for half of that many slots in use, unless a number was requested. A given plan does not
        change; nor does a measured plan, which is for a single request, unless a number was requested."""
        requested = self.step.expected
        if self.plan_file is not None or (self.uses_tuning and not self.step.drafts and requested is None):
            return self
        expected = requested or max(1, slots // 2)
        if requested is None:
            log(f"note: planned for {expected} requests in flight (--expect-parallel)")
        step = replace(self.step, expected=expected, slots=slots)
        return replace(self, step=step, tuned=self.tuned and expected == 1)

    @property
    def uses_tuning(self) -> bool:
        """Whether the plan is the one that tuning found."""
        return self.tuned and self.policy.is_auto

    def check_depth(self, n_depth: int | None) -> None:
        """Raise UsageError for -d together with --plan."""
        if self.plan_file is not None and n_depth is not None:
            raise UsageError("-d changes only planning, so it has no use with --plan; omit it")

    def plan_for(
        self,
        model: str | None,
        workload_for: Callable[[Placer], Workload],
        pictures: ProjectorOptions = NO_PICTURES,
    ) -> Planned:
        """Plan a model for a workload; with --plan return that plan, and a placer on its device unless another is
        requested. model None: the plan's, else the built-in one. pictures: the projector to keep room for. Raises as
        made_plan and device_for_plan."""
        from oallama.placer import Placer
        from oallama.plan.plan import Plan

        if self.plan_file is not None:
            plan = Plan.load(self.plan_file)
            note_planned(self.options)
            options = replace(self.options, device=device_for_plan(self.options.device, plan.device))
            placer = Placer.of_file(model or plan.model_path, options, self.profile)
            check_adapters(placer, plan)
            return Planned(placer, plan, plan.workload, False)
        placer = self.placer(model)
        workload = workload_for(placer)
        placer = pictures.with_room(placer, workload)
        plan, is_untuned = self.made_plan(placer, workload)
        return Planned(placer, plan, workload, is_untuned)

    def placer(self, model: str | None) -> Placer:
        """Open the model; announce the built-in model if none is named."""
        from oallama.placer import Placer

        if model is None:
            model = default_model()
            log(NOTE)
        placer = Placer.of_file(model, self.options, self.profile)
        note_unused(placer, self.policy)
        return placer_beside_adapters(placer)

    def made_plan(self, placer: Placer, workload: Workload) -> tuple[Plan, bool]:
        """Return (the policy's plan, for `auto` the tuned plan; True if it is stock llama.cpp's own placement because
        no plan was measured yet)."""
        workload = self.step.workload(workload)
        placer.drafter = self.step.drafter(placer)
        tuned = self.uses_tuning and (not self.step.drafts or self.step.is_tuned(placer))
        on_cpu = self.policy.keeps_to_cpu(placer)
        if self.step.drafts and not tuned:
            planned = cpu_plan if on_cpu and placer.drafter is None else self.policy.plan
            waits = self.uses_tuning and self.step.repeats and not on_cpu and self.tune != "before"
            if waits and placer.known_profile is None:
                planned = fit_plan
            return self._noted(self.step.plan(placer, workload, planned)), False
        if on_cpu:
            return cpu_plan(placer, workload), False
        from oallama.placer.tuned import in_tuned_context
        from oallama.planner.placement import with_used_experts

        if tuned:
            workload = in_tuned_context(placer, workload)
            if self.tune == "before":
                with continued_later(placer, workload):
                    return tune_and_tell(placer, workload).plan, False
            plan, is_untuned = plan_without_measuring(placer, workload)
            if is_untuned and plan.draft is None:
                self.step.tell_waiting(placer, plan)
            return plan, is_untuned
        plan = self._noted(self.policy.plan(placer, workload))
        return with_used_experts(plan, placer.operators, placer.routing), False

    def _noted(self, plan: Plan) -> Plan:
        for note in plan.notes:
            log(f"note: {note}")
        return plan


def cpu_plan(placer: Placer, workload: Workload) -> Plan:
    """Return the plan of the CPU alone, without measuring."""
    return placer.plan("cpu", workload=workload, measure=False)


def placement_options(tune: Decorator = shared.tune_option, workload: Sequence[Decorator] = ()) -> Decorator:
    """Add the options of commands that run a model; the command gets `asked`, a PlacementOptions. tune: its --tune;
    workload: options of its own, shown among the others."""
    return as_record(
        "asked",
        PlacementOptions,
        option("--plan", "plan_file", type=click.Path(), metavar="FILE", group=Group.PLACEMENT,
               help="Use this plan from `oallama plan`."),
        policy_options,
        step_options,
        shared.gathered(*shared.PLACEMENT, *workload, *shared.CONTEXT, shared.late_option),
        shared.profile_option,
        shared.tuned_option,
        tune,
    )  # fmt: skip


def run_workload(placer: Placer, n_prompt: int, n_gen: int, n_past: int = 0) -> Workload:
    """Return the workload of this prompt. Warns of a context beyond the trained one."""
    workload, trained = placer.workload(n_prompt, n_gen, n_past=n_past), placer.model.n_ctx_train
    if 0 < trained < workload.n_ctx:
        log(
            f"warning: the context of {workload.n_ctx} tokens is longer than the {trained} that this model was trained "
            "on; text beyond that may make no sense"
        )
    return workload


@contextlib.contextmanager
def loaded(
    placer: Placer, plan: Plan, placement: PlacementOptions, answers: AnswerOptions, **options: Any
) -> Iterator[Engine]:
    """Yield a loaded engine and print its warnings; count the uses of experts until its end, if asked for.
    options: further ones of Placer.engine."""
    with contextlib.ExitStack() as stack:
        with busy(f"loading {Path(placer.model.path).name}"):
            count = stack.enter_context(counting(placer, answers.count_experts))
            options |= {"on_expert_counts": count, "server_options": passed_options()}
            engine = stack.enter_context(placer.engine(plan, interactive=True, **options))
        say_warnings(engine, placer, placement.plan_file is not None)
        yield engine


def say_warnings(engine: Engine, placer: Placer, plan_given: bool) -> None:
    """Print the warnings of a loaded model. plan_given: the user gave the plan, and can make a new plan if its memory
    is wrong."""
    for warning in engine.warnings:
        if plan_given or warning != engine.memory.warning:
            log(f"warning: {warning}")
    if placer.device.emulated is not None:
        if placer.device.emulated.values == "drawn":
            log("note: the device is emulated and computes nothing (values=drawn): the text is noise")
        else:
            log("note: the device is emulated on the CPU (values=real): timings here are meaningless; use `bench`")


def expected(placer: Placer, plan: Plan) -> str:
    """Return a line: weights on the device and elsewhere, and expected tokens/s."""
    from oallama.profile.busy import caveat
    from oallama.report.expected import fits_text, rates_text

    placement_text = fits_text(plan, placer.operators, placer.model.n_layer)
    if placer.device.is_emulated:  # with real values its speeds are meaningless
        return placement_text
    doubt = ""
    with contextlib.suppress(OallamaError):  # no answer needs a prediction
        if (profile := placer.known_profile) is not None:
            doubt = f" ({caveat(profile)})" if caveat(profile) else ""
            plan = plan if plan.predicted is not None else replace(plan, predicted=placer.price(plan))
    rates = rates_text(plan, placer.token_seconds(plan, plan.workload.n_ctx))
    return f"{placement_text}; {rates}{doubt if plan.predicted is not None else ''}"


def tell_drift(placer: Placer, answer: Generation, predicted_s: float | None) -> None:
    """Warn if an answer's tokens took longer or shorter than predicted, and say if other programs are the cause."""
    from oallama.profile.busy import others_percent
    from oallama.report.expected import drift_text, is_slow

    n_cores = os.cpu_count() or 1
    slow = is_slow(answer.n_gen, answer.tpot_s, predicted_s)
    others_cores = others_percent() / 100 * n_cores if slow else 0.0
    if drift := drift_text(answer.n_gen, answer.tpot_s, predicted_s, placer.model.path, others_cores, n_cores):
        log(f"warning: {drift}")


def keep_block_times(placer: Placer, engine: Engine) -> None:
    """Add the measured times of blocks to the model's history, for `oallama tune`. Only if a person watches: it takes
    up to a second, which no script should wait for. Warns if the history cannot be written."""
    if not is_interactive():
        return
    try:
        placer.on_devices_of(engine.plan).keep_block_times(engine.plan, engine.runs())
        placer.keep_drafts(engine.plan, engine.drafts())
    except OallamaError as error:
        log(f"warning: this run's times were not saved: {error}")
