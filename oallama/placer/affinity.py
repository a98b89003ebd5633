"""The affinity report of OATO's search, or of any plan. Pure."""

from __future__ import annotations

from dataclasses import replace

from oallama.core.affinity import AffinityReport, Measured
from oallama.core.profile import Profile
from oallama.core.types import ModelInfo, Phase, PlanRecord, Workload
from oallama.place.baselines import baselines
from oallama.place.oato import AffinityRule, affinities
from oallama.place.problem import Decision, Problem, costs_of
from oallama.place.record import placed_by_plan
from oallama.place.simulate import simulate


def search_report(
    model: ModelInfo,
    problem: Problem,
    decision: Decision,
    load: Workload,
    phase: Phase,
    affinity: AffinityRule = "default",
) -> AffinityReport:
    """What OATO's search for a phase decided. load: the workload that was asked for, which baselines are priced for."""
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
        baselines(problem, load, decision.memory),
        measured_on(problem.profile),
    )


def plan_report(model: ModelInfo, problem: Problem, record: PlanRecord, phase: Phase) -> AffinityReport:
    """A plan's places, with the affinities of a phase as everything lies there."""
    load, placed = record.workload, placed_by_plan(model.n_layer, problem.operators, record)
    costs = costs_of(problem, load, phase)
    predicted = record.predicted or simulate(problem, load, placed).predicted
    decision = Decision(record.policy, load, costs, placed, record.memory, predicted, record.notes)
    return replace(
        search_report(model, problem, decision, load, phase),
        policy=record.policy,
        of_plan=True,
        token_assignment=record.token_assignment,
        streaming=record.streaming,
    )


def measured_on(profile: Profile) -> Measured:
    """On what the profile was measured, and when."""
    machine = profile.fingerprint
    return Measured(*(str(machine.get(key) or "") for key in ("cpu", "device_description", "measured_at")))
