"""The affinity report of OATO's search, or of any plan. Pure."""

from __future__ import annotations

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
    profile: Profile,
    problem: Problem,
    decision: Decision,
    load: Workload,
    phase: Phase,
    affinity: AffinityRule,
) -> AffinityReport:
    """What OATO's search for a phase decided. load: the workload that was asked for, which baselines are priced for."""
    placed = decision.placed
    return AffinityReport(
        model,
        profile.device,
        phase,
        placed.iterations,
        placed.converged,
        affinities(decision.costs, problem.operators, placed, affinity),
        decision.memory,
        decision.predicted,
        decision.notes,
        decision.workload,
        baselines(problem, load, decision.memory),
        measured_on(profile),
    )


def plan_report(
    model: ModelInfo, profile: Profile, problem: Problem, record: PlanRecord, phase: Phase
) -> AffinityReport:
    """A plan's places, with the affinities of a phase as everything lies there."""
    placed = placed_by_plan(model.n_layer, problem.operators, record)
    costs = costs_of(problem, record.workload, phase)
    return AffinityReport(
        model,
        profile.device,
        phase,
        0,
        True,
        affinities(costs, problem.operators, placed),
        record.memory,
        record.predicted or simulate(problem, record.workload, placed).predicted,
        record.notes,
        record.workload,
        baselines(problem, record.workload, record.memory),
        measured_on(profile),
        record.policy,
        True,
        record.token_assignment,
        record.streaming,
    )


def measured_on(profile: Profile) -> Measured:
    """On what the profile was measured, and when."""
    machine = profile.fingerprint
    return Measured(*(str(machine.get(key) or "") for key in ("cpu", "device_description", "measured_at")))
