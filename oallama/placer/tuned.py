"""The plan that was measured to be fastest for a workload on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oallama import __version__
from oallama.core.errors import PlanError
from oallama.core.options import DEFAULT_UBATCH
from oallama.core.types import Workload
from oallama.placer.stock import memory_cap, stock_load
from oallama.plan.plan import Plan
from oallama.run.stock import Cap
from oallama.tuned.classes import WorkloadClass, class_of
from oallama.tuned.result import ClassResult, Key, TuneResult
from oallama.tuned.store import memory_step, read_result, timings_digest

if TYPE_CHECKING:
    from oallama.placer.model_on_device import ModelOnDevice


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """A plan with its result. asked: the class of the workload; result: of that class, or of the nearest one."""

    plan: Plan
    asked: WorkloadClass
    result: ClassResult

    @property
    def sentence(self) -> str:
        """The result in use, and the class that it was measured for."""
        substitution = f" (no result for {self.asked.name} yet)" if self.result.of != self.asked else ""
        return f"{self.result.use}{substitution}"


def result_key(target: ModelOnDevice, n_ctx: int, cap: Cap | None = None) -> Key:
    """The conditions of a result for this model, devices and context. cap: memory cap of the devices; None: by a
    no_alloc load. Raises what that raises."""
    options, attention = target.options, target.attention
    cap = cap or memory_cap(target, stock_load(target, n_ctx, options.n_ubatch or DEFAULT_UBATCH))
    memory, *other_steps = map(memory_step, cap.of_each or (cap.device_bytes or 0,))
    return Key(
        model=target.model.fingerprint,
        machine=target.machine_key,
        profile=timings_digest(target.given_profile) if target.given_profile is not None else "",
        oallama=__version__,
        threads=target.threads,
        memory=memory,
        gpu_weights=options.gpu_weights,
        n_ctx=n_ctx,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        flash_attn=attention.flash_attn,
        type_k=attention.type_k,
        type_v=attention.type_v,
        late_first_word=options.late_first_word,
        draft="" if target.drafter is None else target.drafter.identity,
        others=tuple((member.machine_key, step) for member, step in zip(target.members[1:], other_steps, strict=True)),
    )


def in_tuned_context(target: ModelOnDevice, workload: Workload) -> Workload:
    """The workload with the context size that results are measured for: -c, else 4,096 tokens (or as many as the model
    was trained on), doubled until it holds the workload."""
    if target.options.n_ctx is not None:
        return workload
    n_ctx = target.workload(1, 0).n_ctx
    while n_ctx < workload.n_ctx:
        n_ctx *= 2
    return replace(workload, n_ctx=n_ctx)


def _known(target: ModelOnDevice, n_ctx: int) -> TuneResult | None:
    """The cached result, or None. Free memory changes from run to run, so the result of one memory step less counts
    too: its plans fit."""
    key = result_key(target, n_ctx)
    cached = read_result(key)
    return cached if cached or target.options.vram is not None else read_result(replace(key, memory=key.memory - 1))


def tuned_plan(target: ModelOnDevice, workload: Workload, result: TuneResult | None = None) -> TunedPlan | None:
    """The measured plan for a workload's class, or for the nearest class; None: no result. result: the measurements;
    None: the cached ones. Raises as result_key."""
    result = result or _known(target, workload.n_ctx)
    workload_class = class_of(workload)
    class_result = result.nearest(workload_class) if result is not None else None
    if result is None or class_result is None:
        return None
    try:
        plan = result.plan(class_result.plan)
        plan.check(target.model, target.operators)
    except PlanError:  # the file was changed
        return None
    return TunedPlan(replace(plan, model_path=target.model.path), workload_class, class_result)
