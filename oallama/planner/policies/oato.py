"""The `oato` policy: operator-aware tensor offloading (OATO, sections 3.1-3.4), and swaps after its fill."""

from __future__ import annotations

from collections.abc import Iterable

from oallama.planner.placement import Placement
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import Problem, cpu_alone
from oallama.planner.whole import fill_remaining, search, swap_operators


@policy(
    "oato", "operators by GPU affinity",
    reason="including transfers, no operator is predicted to be faster there (--fill full uses it anyway)",
    has_rules=True,
)  # fmt: skip
def oato(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    rules, costs, operator_bytes = inputs.request.rules, inputs.costs, inputs.operator_bytes
    filled = search(costs, operator_bytes, affinity_rule=rules.affinity, fill_rule=rules.fill)
    candidates = [filled]
    if not inputs.request.quick and "paper" not in (rules.affinity, rules.fill):
        candidates.append(swap_operators(costs, problem.operators, operator_bytes, filled))
    if rules.fill == "full":
        candidates = [fill_remaining(costs, operator_bytes, placement, rules.affinity) for placement in candidates]
    elif not rules.need_oato:
        candidates.append(cpu_alone(problem, inputs.workload, inputs.request.phase))
    yield from candidates
