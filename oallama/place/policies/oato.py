"""The `oato` policy: operator-aware tensor offloading (OATO, sections 3.1-3.4), and swaps after its fill."""

from __future__ import annotations

from collections.abc import Iterable

from oallama.place.placement import Placement
from oallama.place.policies.registry import Room, policy
from oallama.place.problem import Problem, cpu_alone
from oallama.place.whole import exchange, search, use_up


@policy(
    "oato", "operators by GPU affinity",
    reason="including transfers, no operator is predicted to be faster there (--fill full uses it anyway)",
)  # fmt: skip
def oato(problem: Problem, room: Room) -> Iterable[Placement]:
    rules, costs, budget = room.asked.rules, room.costs, room.operator_bytes
    filled = search(costs, budget, affinity=rules.affinity, rule=rules.fill)
    found = [filled]
    if not room.asked.quick and "paper" not in (rules.affinity, rules.fill):
        found.append(exchange(costs, problem.operators, budget, filled))
    if rules.fill == "full":
        found = [use_up(costs, budget, one) for one in found]
    elif not rules.are_oatos:
        found.append(cpu_alone(problem, room.workload, room.asked.phase))
    yield from found
