"""The `oato` policy: operator-aware tensor offloading (OATO, sections 3.1-3.4), and swaps after its fill."""

from __future__ import annotations

from collections.abc import Iterable

from oallama.place.placement import Placement
from oallama.place.policies.registry import Room, policy
from oallama.place.problem import Problem
from oallama.place.whole import exchange, search


@policy(
    "oato", "operators by GPU affinity",
    reason="with crossings counted, no operator is predicted to be faster there (--fill full uses it anyway)",
)  # fmt: skip
def oato(problem: Problem, room: Room) -> Iterable[Placement]:
    rules = room.asked.rules
    filled = search(
        room.costs, problem.operators, room.operator_bytes, affinity=rules.affinity, rule=rules.fill
    )  # fmt: skip
    yield filled
    if not room.asked.quick and not rules.are_oatos:
        yield exchange(room.costs, problem.operators, room.operator_bytes, filled)
