"""The affinity report of OATO's search, or of any plan, compared with the plan that `oallama run` uses."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from oallama.core.affinity_report import AffinityReport, Baseline, MeasuredOn, RunPlan
from oallama.core.errors import UsageError
from oallama.core.profile import Profile
from oallama.core.types import MemoryBreakdown, Phase, Workload
from oallama.placer.model_on_device import ModelOnDevice
from oallama.placer.plans import decided, with_doubt
from oallama.placer.stock import stock_attention
from oallama.plan.plan import Plan
from oallama.planner.affinity import AffinityRule, FillRule, affinities
from oallama.planner.decide import larger_ubatches
from oallama.planner.explain import STOCK, baselines
from oallama.planner.placement import placed_by_plan, plan_record
from oallama.planner.policies.registry import Rules
from oallama.planner.policies.stock import stock_decision
from oallama.planner.price import price
from oallama.planner.problem import Problem, costs_of
from oallama.planner.verify import on_cpu


def search_report(
    on: ModelOnDevice,
    phase: Phase = "decode",
    n_prompt: int = 512,
    n_gen: int = 128,
    affinity: AffinityRule = "default",
    fill: FillRule = "continue",
    n_ctx: int | None = None,
) -> AffinityReport:
    """Report where OATO's search puts each operator for one phase ("decode", "prefill" or "mixed"), and why.

    affinity "paper" and fill "paper" follow Algorithm 1 to the letter. Raises UsageError for an unknown phase,
    affinity or fill, DoesNotFit, ProfileError, DeviceError.
    """
    if phase not in get_args(Phase):
        raise UsageError(f"unknown phase {phase!r}; choose from {', '.join(get_args(Phase))}")
    workload = on.workload(n_prompt, n_gen, n_ctx)
    larger = larger_ubatches(workload, on.options)
    decision, mode = decided(on, "oato", workload, phase, Rules(affinity, fill), larger_ubatches=larger)
    placement = decision.placement
    return AffinityReport(
        on.model,
        on.profile().device,
        phase,
        placement.iterations,
        placement.converged,
        affinities(costs_of(on.problem(mode), decision.workload, phase), on.operators, placement, affinity),
        decision.memory,
        decision.predicted,
        with_doubt(on, decision.notes),
        decision.workload,
        _baselines(on, workload, decision.memory),
        measured_on(on.profile()),
    )


def plan_report(on: ModelOnDevice, plan: Plan, workload: Workload, phase: Phase = "decode") -> AffinityReport:
    """Report where a plan puts each operator, with the affinities of a phase under this placement. workload: the
    requested one."""
    problem = on.problem_for(plan)
    placement = placed_by_plan(on.model.n_layer, on.operators, plan)
    return AffinityReport(
        on.model,
        problem.profile.device,
        phase,
        placement.iterations,
        placement.converged,
        affinities(costs_of(problem, plan.workload, phase), on.operators, placement),
        plan.memory,
        plan.predicted or price(problem, plan.workload, placement),
        plan.notes,
        plan.workload,
        _baselines(on, workload, plan.memory),
        measured_on(problem.profile),
        policy=plan.policy,
        of_plan=True,
        token_assignment=plan.token_assignment,
        streaming=plan.streaming,
    )


def with_run(on: ModelOnDevice, report: AffinityReport, plan: Plan, measured: bool) -> AffinityReport:
    """The report beside the plan that `oallama run` uses. measured: that plan won against stock llama.cpp here.
    Stock's own placement, where that is predicted to be faster than a plan that was not measured."""
    run = _run_plan(on, on.problem_for(plan), plan, measured)
    stock = next((one.predicted for one in report.baselines if one.name == STOCK), None)
    if stock is not None and not measured and stock.total_s < run.predicted.total_s:
        workload = on.workload(plan.workload.n_prompt, plan.workload.n_gen, plan.workload.n_ctx)
        problem = on.problem(stock_attention(on))
        stocks = plan_record(stock_decision(problem, workload), on.model, on.operators, str(on.device), "")
        run = _run_plan(on, problem, stocks, False)
    return replace(report, run=run)


def _run_plan(on: ModelOnDevice, problem: Problem, plan: Plan, measured: bool) -> RunPlan:
    return RunPlan(
        plan.policy,
        measured,
        plan.predicted or price(problem, plan.workload, placed_by_plan(on.model.n_layer, on.operators, plan)),
        plan.memory,
        plan.operators,
        plan.token_assignment,
        plan.streaming,
        plan.notes,
    )


def _baselines(on: ModelOnDevice, workload: Workload, held: MemoryBreakdown) -> tuple[Baseline, ...]:
    """Baselines that every plan for a workload is compared with. held: memory of the plan; the bound has the KV cache
    and compute buffers on the host, as some plans do."""
    alone, _ = on.attention_rule.decide(
        lambda mode: on_cpu(on.problem(mode), workload, "mixed"), on.profile(), workload
    )
    held = replace(held, kv=0, compute=0)
    return baselines(on.problem(stock_attention(on)), workload, held, alone.predicted)


def measured_on(profile: Profile) -> MeasuredOn:
    """On what the profile was measured, and when."""
    machine = profile.fingerprint
    return MeasuredOn(*(str(machine.get(key) or "") for key in ("cpu", "device_description", "measured_at")))
