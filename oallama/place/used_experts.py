"""Choose a plan's hot experts again by what was used since the plan was made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from oallama.core.routing import Routing
from oallama.core.types import Operator, PlanRecord
from oallama.cost.experts import expert_use

R = TypeVar("R", bound=PlanRecord)


def with_used_experts(plan: R, operators: Sequence[Operator], routing: Routing | None) -> R:
    """The plan with as many hot experts, each layer's the most used in decode. A layer of which too little is known
    keeps its own."""
    use = {} if routing is None else expert_use(routing)
    layers = {operator.name: operator.layer for operator in operators}
    placements = tuple(
        replace(p, hot_experts=tuple(sorted(use[layer].order[: len(p.hot_experts)])))
        if p.hot_experts and (layer := layers[p.name]) in use
        else p
        for p in plan.operators
    )
    return plan if placements == plan.operators else replace(plan, operators=placements)
