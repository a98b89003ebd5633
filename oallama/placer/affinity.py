"""The affinity report of OATO's search, or of any plan, beside the plan that `oallama run` uses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oallama.core.affinity import Affinity, AffinityReport, Baseline, Measured, RunPlan
from oallama.core.profile import Profile
from oallama.core.types import Backend, ModelInfo, Operator, OperatorPlacement, Phase, Predicted
from oallama.cost.whole import Costs
from oallama.place.affinity import AffinityRule, Transfers, normalise, rank
from oallama.place.affinity import affinity as b_of
from oallama.place.placement import Decision, Placed, placed_by_plan, placements
from oallama.place.price import price
from oallama.place.problem import Problem, costs_of
from oallama.plan.plan import Plan


def search_report(
    model: ModelInfo,
    problem: Problem,
    decision: Decision,
    phase: Phase,
    affinity: AffinityRule = "default",
    against: Sequence[Baseline] = (),
) -> AffinityReport:
    """Report of OATO's decision for a phase. against: baselines that it is compared with."""
    placed = decision.placed
    return AffinityReport(
        model,
        problem.profile.device,
        phase,
        placed.iterations,
        placed.converged,
        affinities(decision.costs, problem.operators, placed, affinity),
        decision.memory,
        decision.predicted,
        decision.notes,
        decision.workload,
        tuple(against),
        measured_on(problem.profile),
    )


def plan_report(
    model: ModelInfo, problem: Problem, record: Plan, phase: Phase, against: Sequence[Baseline] = ()
) -> AffinityReport:
    """A plan's places, with the affinities of a phase as everything lies there."""
    load, placed = record.workload, placed_by_plan(model.n_layer, problem.operators, record)
    costs = costs_of(problem, load, phase)
    decision = Decision(
        record.policy, load, costs, placed, record.memory, predicted_by(model, problem, record), record.notes
    )
    return replace(
        search_report(model, problem, decision, phase, against=against),
        policy=record.policy,
        of_plan=True,
        token_assignment=record.token_assignment,
        streaming=record.streaming,
    )


def run_plan(model: ModelInfo, problem: Problem, record: Plan, measured: bool) -> RunPlan:
    """The plan that `oallama run` uses, for a report."""
    return RunPlan(
        record.policy,
        measured,
        predicted_by(model, problem, record),
        record.memory,
        record.operators,
        record.token_assignment,
        record.streaming,
        record.notes,
    )


def predicted_by(model: ModelInfo, problem: Problem, record: Plan) -> Predicted:
    """Predicted seconds of a plan, priced where the plan has none."""
    placed = placed_by_plan(model.n_layer, problem.operators, record)
    return record.predicted or price(problem, record.workload, placed)


def measured_on(profile: Profile) -> Measured:
    """On what the profile was measured, and when."""
    machine = profile.fingerprint
    return Measured(*(str(machine.get(key) or "") for key in ("cpu", "device_description", "measured_at")))


def affinities(
    costs: Costs, operators: Sequence[Operator], placed: Placed, affinity: AffinityRule = "default"
) -> tuple[Affinity, ...]:
    """The report's rows, best rank first: every operator's T' and B given where all the others finally are."""
    transfers = Transfers(costs, affinity == "paper")
    t_transfer = []
    benefits = []
    for index in range(len(operators)):
        cost = costs.operators[index]
        t_transfer.append(transfers.of(placed.on_device, placed.first_device_layer, (index,)))
        benefits.append(b_of(cost.t_cpu_s, cost.t_gpu_s, t_transfer[-1], cost.bytes))
    possible = [i for i, cost in enumerate(costs.operators) if cost.t_gpu_s is not None]
    normal = dict(zip(possible, normalise([benefits[i] for i in possible]), strict=True))
    there = placements(operators, placed)
    rows = []
    for position, index in enumerate(rank(benefits), start=1):
        operator, cost = operators[index], costs.operators[index]
        rows.append(
            Affinity(
                operator.name,
                operator.layer,
                operator.role,
                operator.type,
                operator.shape,
                operator.bytes,
                cost.t_cpu_s,
                cost.t_gpu_s,
                t_transfer[index],
                benefits[index] if index in normal else None,
                normal.get(index, 0.0),
                position,
                _backend(there[index]),
                there[index].gg,
                there[index].cg,
                there[index].cc,
                len(there[index].hot_experts),
            )
        )
    return tuple(rows)


def _backend(placement: OperatorPlacement) -> Backend:
    split = placement.gg or placement.cg or placement.hot_experts
    return "GPU" if placement.gg == 1 else "split" if split else "CPU"
