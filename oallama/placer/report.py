"""The affinity report of OATO's search, or of any plan, compared with the plan that `oallama run` uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from oallama.core.affinity_report import Affinity, Baseline, DeviceTimes, MeasuredOn
from oallama.core.errors import UsageError
from oallama.core.profile import Profile
from oallama.core.types import MemoryBreakdown, Operator, Phase, Workload
from oallama.device.spec import parse_device
from oallama.placer.model_on_device import ModelOnDevice
from oallama.placer.plans import with_doubt
from oallama.placer.stock import stock_attention
from oallama.plan.plan import Plan
from oallama.planner.affinity import AffinityRule, FillRule, affinities, ranked
from oallama.planner.decide import decide, larger_ubatches
from oallama.planner.explain import CPU_ALONE, STOCK, baselines
from oallama.planner.placement import Placement, placed_by_plan, plan_record
from oallama.planner.policies.oato import oato
from oallama.planner.policies.registry import Request, Rules
from oallama.planner.policies.stock import cpu, stock_decision
from oallama.planner.policies.stock_over import stock_over
from oallama.planner.price import price
from oallama.planner.problem import Problem, costs_of
from oallama.report.operators import AffinityReport, RunPlan, predicted_by
from oallama.report.plan import layer_ranges

MORE_REQUESTS, BETTER = (2, 4, 8, 16), 1.03
"""Numbers of requests in flight for which other plans are tried, and the least speed ratio that is worth mentioning."""


def search_report(
    on: ModelOnDevice,
    phase: Phase = "decode",
    n_prompt: int = 512,
    n_gen: int = 128,
    affinity: AffinityRule = "default",
    fill: FillRule = "continue",
    n_ctx: int | None = None,
) -> AffinityReport:
    """Report where OATO's search places each operator for one phase ("decode", "prefill" or "mixed"), and why.

    affinity "paper" and fill "paper" follow Algorithm 1 to the letter. Raises UsageError for an unknown phase,
    affinity or fill, DoesNotFit, ProfileError, DeviceError.
    """
    if phase not in get_args(Phase):
        raise UsageError(f"unknown phase {phase!r}; choose from {', '.join(get_args(Phase))}")
    on.check_one_device("OATO's search")
    workload = on.workload(n_prompt, n_gen, n_ctx)
    larger = larger_ubatches(workload, on.options)
    request = Request(workload, oato, phase, Rules(affinity, fill), n_ubatches=larger)
    problems = on.problems
    with on.no_alloc_loads.together():
        decision = decide(problems.worth_planning(request), request)
    plan = plan_record(replace(decision, policy=oato.name), on.model, on.operators, str(on.device))
    plan, problem = replace(plan, notes=with_doubt(on, plan.notes)), on.problem(decision.flash_attn)
    return _report(on, phase, plan, problem, decision.placement, workload, affinity)


def plan_report(on: ModelOnDevice, plan: Plan, workload: Workload, phase: Phase = "decode") -> AffinityReport:
    """Report where a plan places each operator, with affinities of a phase under this placement. workload: the
    requested one."""
    problem, placement = on.problem_for(plan), placed_by_plan(on.model.n_layer, on.operators, plan)
    return replace(_report(on, phase, priced(on, problem, plan), problem, placement, workload), of_plan=True)


def report_over(on: ModelOnDevice, plan: Plan, workload: Workload, phase: Phase = "decode") -> AffinityReport:
    """Report a plan of several devices. Each operator has its affinity on the device of its layer; layers of the host
    count with the first device used. T' assumes neighbours on the same device. workload: the requested one. Raises as
    planning does."""
    flash_attn, n_layer = on.attention_for(plan).flash_attn, on.model.n_layer
    placement = placed_by_plan(n_layer, on.operators, plan)
    problems = [member.problem(flash_attn).of_step(plan.workload.step) for member in on.members]
    each = [
        {row.name: row for row in affinities(costs_of(problem, plan.workload, phase), on.operators, placement)}
        for problem in problems
    ]
    ranges = device_ranges(on, plan)
    memory = dict(zip(ranges, plan.memory.devices or (plan.memory,), strict=False))
    devices = tuple(
        DeviceTimes(
            str(member.device), ranges.get(number, (0, 0)), memory.get(number),
            {name: (row.t_gpu_s, row.t_transfer_s) for name, row in each[number].items()},
            {name: row.saved_s for name, row in each[number].items()},
        )
        for number, member in enumerate(on.members)
    )  # fmt: skip

    def row_of(operator: Operator) -> Affinity:
        layer = operator.layer_in(n_layer)
        has = (number for number, (begin, end) in ranges.items() if begin <= layer < end)
        return each[next(has, min(ranges, default=0))][operator.name]

    rows, first = ranked(list(map(row_of, on.operators))), problems[0].profile
    plan = replace(plan, notes=with_doubt(on, plan.notes))
    return AffinityReport(
        on.model, str(on.device), phase, plan, rows, 0, True, _baselines_over(on, workload), measured_on(first), True,
        devices=devices,
    )  # fmt: skip


def device_ranges(on: ModelOnDevice, plan: Plan) -> dict[int, tuple[int, int]]:
    """The layers [begin, end) of each requested device in a plan; the output counts as one layer after the last."""
    n_layer, names = on.model.n_layer, [member.device.measured for member in on.members]
    used = [] if plan.device == "none" else [one.measured for one in parse_device(plan.device).each]
    ranges = layer_ranges(plan, on.operators, n_layer) or [(n_layer + 1 - plan.n_gpu_layers, n_layer + 1)]
    found: dict[int, tuple[int, int]] = {}
    for name, span in zip(used, ranges, strict=False):  # two may have the same name
        found[next(n for n, other in enumerate(names) if other == name and n not in found)] = span
    return found


def _baselines_over(on: ModelOnDevice, workload: Workload) -> tuple[Baseline, ...]:
    """The baselines over several devices: stock llama.cpp over all and on each (numbered as in `bench`), and the CPU
    alone."""
    request = Request(workload, cpu)
    alone = decide(on.problems.worth_planning(request), request)
    problem = on.problem(stock_attention(on))
    over = stock_over(problem, workload)
    return (
        *([] if over is None else [Baseline(STOCK, over.predicted)]),
        *(
            Baseline(f"{STOCK}@{number}", stock_decision(device, workload).predicted)
            for number, device in enumerate(problem.devices)
        ),
        Baseline(CPU_ALONE, alone.predicted),
    )


def _report(
    on: ModelOnDevice,
    phase: Phase,
    plan: Plan,
    problem: Problem,
    placement: Placement,
    workload: Workload,
    affinity: AffinityRule = "default",
) -> AffinityReport:
    rows = affinities(costs_of(problem, plan.workload, phase), on.operators, placement, affinity)
    ended, held_against = (placement.iterations, placement.converged), _baselines(on, workload, plan.memory)
    device, measured = problem.profile.device, measured_on(problem.profile)
    return AffinityReport(on.model, device, phase, plan, rows, *ended, held_against, measured)


def priced(on: ModelOnDevice, problem: Problem, plan: Plan) -> Plan:
    """The plan with predicted times, also if it was made without a profile."""
    if plan.predicted is not None:
        return plan
    placement = placed_by_plan(on.model.n_layer, on.operators, plan)
    return replace(plan, predicted=price(problem, plan.workload, placement))


def with_more_requests(
    on: ModelOnDevice, report: AffinityReport, workload: Workload, make: Callable[[Workload], Plan]
) -> AffinityReport:
    """The report with the number of requests in flight from which another plan is faster. workload: the requested one;
    make: makes a plan for a workload."""
    plan = report.plan
    problem = on.problem_for(plan)
    placement = placed_by_plan(on.model.n_layer, on.operators, plan)
    for n_parallel in (n for n in MORE_REQUESTS if n > workload.step.n_parallel):
        asked = replace(workload, step=replace(workload.step, n_parallel=n_parallel, n_slots=n_parallel))
        other = make(asked)
        same = price(problem, replace(asked, n_ubatch=plan.workload.n_ubatch), placement)
        if other.predicted is not None and same.total_s > BETTER * other.predicted.total_s:
            gain = same.total_s / other.predicted.total_s
            note = f"with {n_parallel} requests at once another plan ({other.policy}) would be {gain:.2f}× as fast"
            noted = replace(report.plan, notes=(*report.plan.notes, f"{note}; plan for them with --expect-parallel"))
            return replace(report, plan=noted)
    return report


def with_run(on: ModelOnDevice, report: AffinityReport, plan: Plan, measured: bool) -> AffinityReport:
    """The report with the plan that `oallama run` uses for comparison. measured: that plan won against stock llama.cpp
    here. A plan that was not measured is replaced by stock's placement if that is predicted to be faster."""
    plan = priced(on, on.problem_for(plan), plan)
    stock = next((one.predicted for one in report.baselines if one.name == STOCK), None)
    if stock is not None and not measured and stock.total_s < predicted_by(plan).total_s:
        workload = on.workload(plan.workload.n_prompt, plan.workload.n_gen, plan.workload.n_ctx)
        decision = stock_decision(on.problem(stock_attention(on)), workload)
        plan = plan_record(decision, on.model, on.operators, str(on.device))
    return replace(report, run=RunPlan(plan, measured))


def _baselines(on: ModelOnDevice, workload: Workload, held: MemoryBreakdown) -> tuple[Baseline, ...]:
    """The baselines of plans for a workload. held: memory of the plan; in the bound KV cache and compute buffers are on
    the host, as in some plans."""
    request = Request(workload, cpu)
    alone = decide(on.problems.worth_planning(request), request)
    held = replace(held, kv=0, compute=0)
    return baselines(on.problem(stock_attention(on)), workload, held, alone.predicted)


def measured_on(profile: Profile) -> MeasuredOn:
    """The machine and time of the profile's measurements."""
    machine = profile.fingerprint
    return MeasuredOn(*(str(machine.get(key) or "") for key in ("cpu", "device_description", "measured_at")))
