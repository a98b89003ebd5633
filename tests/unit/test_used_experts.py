"""A plan's hot experts at a load: as many as planned, the most used by then, where enough is known."""

from __future__ import annotations

from dataclasses import replace

from worlds import placed, some_plan, weight

from oallama.core.routing import Routing, Tally, Traffic
from oallama.place.placement import with_used_experts
from oallama.profile.routing import ENOUGH_TOKENS, counted, unknown_routing

N_EXPERT, N_USED = 8, 2
UNKNOWN = unknown_routing("f" * 64, N_EXPERT, N_USED)
OPERATORS = [
    weight(role=role, k=64, n=64, layer=layer, n_expert=N_EXPERT, used=N_USED)
    for layer in (0, 1)
    for role in ("ffn_up_exps", "ffn_down_exps")
]
PLAN = some_plan((placed(operator.name, hot=(0, 1)) for operator in OPERATORS), policy="experts")
USES = Tally(2 * ENOUGH_TOKENS, (0, 96, 0, 1900, 0, 2100, 0, 0))


def known(*answers: dict[int, Tally]) -> Routing:
    routing = UNKNOWN
    for tallies in answers:
        routing = counted(routing, Traffic(tallies, {}))
    return routing


def test_the_most_used_are_taken_where_enough_is_known() -> None:
    routing = known({0: USES}, {0: USES, 1: USES})  # of layer 1 one recording alone
    made = with_used_experts(PLAN, OPERATORS, routing)
    assert [p.hot_experts for p in made.operators] == [(3, 5), (3, 5), (0, 1), (0, 1)]
    assert replace(made, operators=PLAN.operators) == PLAN, "nothing else changes"


def test_a_plan_stays_where_nothing_is_known_or_hot() -> None:
    routing = known({0: USES}, {0: USES})
    cold = replace(PLAN, operators=tuple(replace(p, hot_experts=()) for p in PLAN.operators))
    for plan, uses in ((PLAN, None), (PLAN, UNKNOWN), (cold, routing)):
        assert with_used_experts(plan, OPERATORS, uses) is plan
