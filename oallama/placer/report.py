"""The affinity report of OATO's search, or of any plan, compared with the plan that `oallama run` uses."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from oallama.core.affinity_report import Affinity, Baseline, DeviceTimes, MeasuredOn
from oallama.core.errors import UsageError
from oallama.core.profile import Profile
from oallama.core.types import MemoryBreakdown, Operator, Phase, Predicted, Workload
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
from oallama.planner.policies.stock import cpu_policy, verified_stock
from oallama.planner.policies.stock_devices import stock_over_devices
from oallama.planner.price import price
from oallama.planner.problem import Problem, costs_of
from oallama.report.operators import AffinityReport, PlanInUse, predicted_by
from oallama.report.plan import layer_ranges


def search_report(
    target: ModelOnDevice,
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
    target.check_one_device("OATO's search")
    workload = target.workload(n_prompt, n_gen, n_ctx)
    larger = larger_ubatches(workload, target.options)
    request = Request(workload, oato, phase, Rules(affinity, fill), n_ubatches=larger)
    problems = target.problems
    with target.no_alloc_loads.together():
        verified = decide(problems.worth_planning(request), request)
    plan = plan_record(replace(verified, policy=oato.name), target.model, target.operators, str(target.device))
    plan, problem = replace(plan, notes=with_doubt(target, plan.notes)), target.problem(verified.flash_attn)
    return _report(target, phase, plan, problem, verified.placement, workload, affinity)


def plan_report(target: ModelOnDevice, plan: Plan, workload: Workload, phase: Phase = "decode") -> AffinityReport:
    """Report where a plan places each operator, with affinities of a phase under this placement. workload: the
    requested one."""
    problem, placement = target.problem_for(plan), placed_by_plan(target.model.n_layer, target.operators, plan)
    return replace(_report(target, phase, priced(target, problem, plan), problem, placement, workload), of_plan=True)


def report_over(target: ModelOnDevice, plan: Plan, workload: Workload, phase: Phase = "decode") -> AffinityReport:
    """Report a plan of several devices. Each operator has its affinity on the device of its layer; layers of the host
    count with the first device used. T' assumes neighbours on the same device. workload: the requested one. Raises as
    planning does."""
    flash_attn, n_layer = target.attention_for(plan).flash_attn, target.model.n_layer
    placement = placed_by_plan(n_layer, target.operators, plan)
    problems = [member.problem(flash_attn).of_step(plan.workload.step) for member in target.members]
    device_rows = [
        {row.name: row for row in affinities(costs_of(problem, plan.workload, phase), target.operators, placement)}
        for problem in problems
    ]
    ranges = device_ranges(target, plan)
    memory = dict(zip(ranges, plan.memory.devices or (plan.memory,), strict=False))
    devices = tuple(
        DeviceTimes(str(member.device), ranges.get(number, (0, 0)), memory.get(number), device_rows[number])
        for number, member in enumerate(target.members)
    )

    def row_of(operator: Operator) -> Affinity:
        layer = operator.layer_in(n_layer)
        has = (number for number, (begin, end) in ranges.items() if begin <= layer < end)
        return device_rows[next(has, min(ranges, default=0))][operator.name]

    rows, first_profile = ranked(list(map(row_of, target.operators))), problems[0].profile
    plan = replace(plan, notes=with_doubt(target, plan.notes))
    return AffinityReport(
        target.model, str(target.device), phase, plan, rows, 0, True, _baselines_over(target, workload),
        measured_on(first_profile), True, devices=devices,
    )  # fmt: skip


def device_ranges(target: ModelOnDevice, plan: Plan) -> dict[int, tuple[int, int]]:
    """The layers [begin, end) of each requested device in a plan; the output counts as one layer after the last."""
    n_layer, names = target.model.n_layer, [member.device.measured for member in target.members]
    used = [] if plan.device == "none" else [device.measured for device in parse_device(plan.device).each]
    ranges = layer_ranges(plan, target.operators, n_layer) or [(n_layer + 1 - plan.n_gpu_layers, n_layer + 1)]
    range_by_device: dict[int, tuple[int, int]] = {}
    for name, span in zip(used, ranges, strict=False):  # two may have the same name
        number = next(n for n, measured in enumerate(names) if measured == name and n not in range_by_device)
        range_by_device[number] = span
    return range_by_device


def _baselines_over(target: ModelOnDevice, workload: Workload) -> tuple[Baseline, ...]:
    """The baselines over several devices: stock llama.cpp over all and on each (numbered as in `bench`), and the CPU
    alone."""
    problem = target.problem(stock_attention(target))
    stock_over_all = stock_over_devices(problem, workload)
    return (
        *([] if stock_over_all is None else [Baseline(STOCK, stock_over_all.predicted)]),
        *(
            Baseline(f"{STOCK}@{number}", verified_stock(device, workload).predicted)
            for number, device in enumerate(problem.devices)
        ),
        Baseline(CPU_ALONE, _cpu_alone(target, workload)),
    )


def _report(
    target: ModelOnDevice,
    phase: Phase,
    plan: Plan,
    problem: Problem,
    placement: Placement,
    workload: Workload,
    affinity: AffinityRule = "default",
) -> AffinityReport:
    rows = affinities(costs_of(problem, plan.workload, phase), target.operators, placement, affinity)
    return AffinityReport(
        target.model, problem.profile.device, phase, plan, rows, placement.iterations, placement.converged,
        _baselines(target, workload, plan.memory), measured_on(problem.profile),
    )  # fmt: skip


def priced(target: ModelOnDevice, problem: Problem, plan: Plan) -> Plan:
    """The plan with predicted times, also if it was made without a profile."""
    if plan.predicted is not None:
        return plan
    placement = placed_by_plan(target.model.n_layer, target.operators, plan)
    return replace(plan, predicted=price(problem, plan.workload, placement))


def with_run(target: ModelOnDevice, report: AffinityReport, plan: Plan, measured: bool) -> AffinityReport:
    """The report with the plan that `oallama run` uses for comparison. measured: that plan won against stock llama.cpp
    here. A plan that was not measured is replaced by stock's placement if that is predicted to be faster."""
    plan = priced(target, target.problem_for(plan), plan)
    stock = next((baseline.predicted for baseline in report.baselines if baseline.name == STOCK), None)
    if stock is not None and not measured and stock.total_s < predicted_by(plan).total_s:
        workload = target.workload(plan.workload.n_prompt, plan.workload.n_gen, plan.workload.n_ctx)
        verified = verified_stock(target.problem(stock_attention(target)), workload)
        plan = plan_record(verified, target.model, target.operators, str(target.device))
    return replace(report, run=PlanInUse(plan, measured))


def _baselines(target: ModelOnDevice, workload: Workload, memory: MemoryBreakdown) -> tuple[Baseline, ...]:
    """The baselines of plans for a workload. memory: of the plan; in the bound KV cache and compute buffers are on
    the host, as in some plans."""
    memory = replace(memory, kv=0, compute=0)
    return baselines(target.problem(stock_attention(target)), workload, memory, _cpu_alone(target, workload))


def _cpu_alone(target: ModelOnDevice, workload: Workload) -> Predicted:
    request = Request(workload, cpu_policy)
    return decide(target.problems.worth_planning(request), request).predicted


def measured_on(profile: Profile) -> MeasuredOn:
    """The machine and time of the profile's measurements."""
    machine = profile.fingerprint
    return MeasuredOn(*(str(machine.get(key) or "") for key in ("cpu", "device_description", "measured_at")))
