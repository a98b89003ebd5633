"""The `oato` policy: operator-aware tensor offloading (OATO, sections 3.1-3.4), and swaps after its fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from oallama.core.types import Operator
from oallama.cost.placement import Costs
from oallama.place.affinity import GRANULARITIES, AffinityRule, FillRule, Granularity, algorithm_1, units
from oallama.place.exchange import exchange
from oallama.place.placed import Budget, Placed, cpu, layers, whole_bytes
from oallama.place.policies.registry import Room, policy
from oallama.place.problem import Problem
from oallama.place.transfers import Transfers, Unit


@policy(
    "oato", "operators by GPU affinity",
    reason="with crossings counted, no operator is predicted to be faster there (--fill full uses it anyway)",
)  # fmt: skip
def oato(problem: Problem, room: Room) -> Iterable[Placed]:
    rules = room.asked.rules
    filled = search(
        room.costs, problem.operators, room.operator_bytes, affinity=rules.affinity, rule=rules.fill
    )  # fmt: skip
    yield filled
    if not room.asked.quick and not rules.are_oatos:
        yield exchange(room.costs, problem.operators, room.operator_bytes, filled)


def device_layer_choices(n_layer: int, also: int) -> tuple[int, ...]:
    """Values of first_device_layer that are tried: all layers on the device, then every eighth of them, down to none,
    and `also`. A layer whose KV is on the host runs its attention there, which pays when its weights are there as
    well."""
    step = max(1, n_layer // 8)
    return tuple(sorted({*range(0, n_layer, step), n_layer, n_layer + 1, also}))


def search(
    costs: Costs,
    operators: Sequence[Operator],
    budget: Budget,
    *,
    affinity: AffinityRule = "default",
    rule: FillRule = "continue",
    first_layers: Sequence[int] | None = None,
    granularities: Sequence[Granularity] = GRANULARITIES,
    transfers: Transfers | None = None,
) -> Placed:
    """The placement with the least predicted time over the passes of `costs`, but for what is published.

    transfers: of these costs, where several budgets are searched. first_layers: from which layers on norms and KV may
    be on the device; None: those of device_layer_choices.

    affinity "paper" is Algorithm 1 as published: single operators, T' (see affinity.py for what is an interpretation of
    it) never negative, the placement that the loop converged to, whatever it is predicted to take; norms and KV of all
    layers are on the device, or of as many as fit. rule "full" takes the least predicted time among placements that
    leave no room there.
    """
    n_layer = costs.graph.n_layer
    if first_layers is None:
        first_layers = device_layer_choices(n_layer, layers(costs, budget).first_device_layer)
    transfers = transfers or Transfers(costs, affinity == "paper")
    grouped = {granularity: units(operators, granularity) for granularity in {*granularities, "operator"}}
    rooms = [(first, budget(first)) for first in first_layers if rule != "full" or first <= n_layer]
    rooms = [(first, room) for first, room in rooms if room >= 0]
    least_s = dict.fromkeys((first for first, _ in rooms), 0.0)
    if rule == "continue" and affinity == "default":
        ranked = _by_worth(costs)
        least_s = {first: _bound(costs, ranked, room, first) for first, room in rooms}
    best: Placed | None = None
    for first, room in sorted(rooms, key=lambda one: least_s[one[0]]):
        if best is not None and least_s[first] > best.seconds:
            break
        for placed in _searches(costs, grouped, room, first, transfers, affinity, rule, granularities):
            if rule == "full" and best is not None and not _is_full(costs, placed, room):
                continue
            if best is None or (placed.seconds, first) < (best.seconds, best.first_device_layer):
                best = placed
        if affinity == "paper":
            break
    return best or cpu(costs)


def _by_worth(costs: Costs) -> list[tuple[float, int, int]]:
    """(seconds that an operator saves on the device, its bytes, its layer), what saves the most for each byte first."""
    layer_of = costs.graph.operator_layer
    saving = [
        (cost.t_cpu_s - cost.t_gpu_s, cost.bytes, layer)
        for cost, layer in zip(costs.operators, layer_of, strict=True)
        if cost.t_gpu_s is not None and cost.t_cpu_s > cost.t_gpu_s
    ]
    return sorted(saving, key=lambda one: -one[0] / max(1, one[1]))


def _bound(costs: Costs, ranked: Sequence[tuple[float, int, int]], room: int, first: int) -> float:
    """No placement with the layers from `first` on and `room` bytes of their operators on the device takes less: what
    saves the most for each byte is there, the last in part, and nothing crosses."""
    seconds = costs.rest_seconds(first) + sum(cost.t_cpu_s for cost in costs.operators)
    for saved_s, n_bytes, layer in ranked:
        if layer < first:
            continue
        if n_bytes > room:
            return seconds - saved_s * room / n_bytes
        room -= n_bytes
        seconds -= saved_s
    return seconds


def _is_full(costs: Costs, placed: Placed, room: int) -> bool:
    """Whether no operator that the device can compute would still fit."""
    used = whole_bytes(costs.operators, placed.on_device)
    return all(
        there or cost.t_gpu_s is None or used + cost.bytes > room
        for cost, there in zip(costs.operators, placed.on_device, strict=True)
    )


def _searches(
    costs: Costs,
    grouped: Mapping[Granularity, tuple[Unit, ...]],
    room: int,
    first: int,
    transfers: Transfers,
    affinity: AffinityRule,
    rule: FillRule,
    granularities: Sequence[Granularity],
) -> Iterable[Placed]:
    def groups(granularity: Granularity) -> tuple[Unit, ...]:
        """Units whose layer has its norms and KV on the device: an operator without them would be there alone."""
        layer_of = costs.graph.operator_layer
        return tuple(unit for unit in grouped[granularity] if layer_of[unit[0]] >= first)

    singles = groups("operator")
    if affinity == "paper":
        yield algorithm_1(costs, singles, room, first, transfers=transfers, rule=rule, published=True)
        return
    for granularity in granularities:
        found = algorithm_1(costs, groups(granularity), room, first, transfers=transfers, rule=rule)
        yield found
        if granularity != "operator":  # let single operators use what the groups left over
            yield algorithm_1(costs, singles, room, first, transfers=transfers, rule=rule, start=found.on_device)
    whole = layers(costs, lambda at: room, first).on_device
    yield algorithm_1(costs, singles, room, first, transfers=transfers, rule=rule, start=whole)
