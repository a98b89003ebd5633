"""The `oato` policy: operator-aware tensor offloading (OATO, sections 3.1-3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.core.types import Affinity, Operator
from oallama.cost.predict import Costs, placement_seconds
from oallama.place.affinity import (
    Search,
    Unit,
    benefit,
    iterate,
    marginal_transfer,
    normalise,
    paper_transfer,
    rank,
)
from oallama.place.fill import FillRule
from oallama.place.units import GRANULARITIES, units

AffinityRule = Literal["default", "paper"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement of whole operators: which are on the device, and how many layers have their norms and KV there."""

    on_device: tuple[bool, ...]
    first_device_layer: (
        int  # layers from here on have norms and KV on the device; n_layer + 1: none, not even the output
    )
    iterations: int
    converged: bool
    seconds: float


def device_layer_choices(n_layer: int) -> tuple[int, ...]:
    """Values of first_device_layer that are tried: all on the device first, then every eighth of the layers, down to
    none. A layer whose KV is on the host runs its attention there, which pays when its weights are there as well."""
    step = max(1, n_layer // 8)
    return tuple(sorted({*range(0, n_layer + 1, step), n_layer, n_layer + 1}))


def search(
    costs: Costs,
    operators: Sequence[Operator],
    budget: Callable[[int], int],
    *,
    affinity: AffinityRule = "default",
    rule: FillRule = "continue",
    choices: Iterable[int] | None = None,
) -> Placed:
    """The placement with the least predicted time over the passes of `costs`.

    budget(first_device_layer): bytes left for operators once KV, compute buffers and the other tensors of those layers
    are on the device; negative: that choice does not fit. "paper" runs Algorithm 1 as published: single operators, KV
    on the device, T' never negative, no regard to gains.
    """
    n_layer = costs.graph.n_layer
    options = (
        tuple(choices) if choices is not None else ((0,) if affinity == "paper" else device_layer_choices(n_layer))
    )
    best: Placed | None = None
    for first in options:
        room = budget(first)
        if room < 0:
            continue
        for found in _searches(costs, operators, room, first, affinity, rule):
            placed = Placed(found.on_device, first, found.iterations, found.converged, found.seconds)
            if best is None or placed.seconds < best.seconds:
                best = placed
    if best is None:
        first = options[-1]
        nothing = (False,) * len(costs.operators)
        return Placed(nothing, first, 0, True, placement_seconds(costs, nothing, first))
    return best


def _searches(
    costs: Costs, operators: Sequence[Operator], room: int, first: int, affinity: AffinityRule, rule: FillRule
) -> Iterable[Search]:
    if affinity == "paper":
        yield iterate(
            costs, units(operators, "operator"), room, first, transfer=paper_transfer, rule=rule, only_gains=False
        )
        return
    singles = units(operators, "operator")
    for granularity in GRANULARITIES:
        groups = units(operators, granularity)
        found = iterate(costs, groups, room, first, rule=rule)
        yield found
        if len(groups) != len(singles):  # let single operators use what the groups left over
            yield iterate(costs, singles, room, first, rule=rule, start=found.on_device)
    yield iterate(costs, singles, room, first, rule=rule, start=contiguous(costs, room, first))


def contiguous(costs: Costs, room: int, first: int) -> tuple[bool, ...]:
    """The operators of the last layers that fit, from the output backwards: what -ngl would do with these bytes."""
    on_device = [False] * len(costs.operators)
    used = 0
    layers = costs.graph.operator_layer
    for layer in range(costs.graph.n_layer, -1, -1):
        members = [i for i, at in enumerate(layers) if at == layer]
        size = sum(costs.operators[i].bytes for i in members)
        if used + size > room or any(costs.operators[i].t_gpu_s is None for i in members):
            break
        used += size
        for i in members:
            on_device[i] = True
    return tuple(on_device)


def affinities(
    costs: Costs, operators: Sequence[Operator], placed: Placed, affinity: AffinityRule = "default"
) -> tuple[Affinity, ...]:
    """The report's rows, best rank first: every operator's T' and B given where all the others finally are."""
    transfer = paper_transfer if affinity == "paper" else marginal_transfer
    t_transfer = []
    benefits = []
    for index in range(len(operators)):
        unit: Unit = (index,)
        t_transfer.append(transfer(costs, placed.on_device, placed.first_device_layer, unit))
        benefits.append(benefit(costs, unit, t_transfer[-1]))
    possible = [i for i, cost in enumerate(costs.operators) if cost.t_gpu_s is not None]
    normal = dict(zip(possible, normalise([benefits[i] for i in possible]), strict=True))
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
                "GPU" if placed.on_device[index] else "CPU",
            )
        )
    return tuple(rows)
