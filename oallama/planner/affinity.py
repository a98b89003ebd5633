"""GPU affinity and the smart operator scheduling algorithm (OATO, section 3.3 and Algorithm 1, with its line numbers).

B_i = (T_ci - T_gi - T'_i) / M_i: the seconds that operator i saves per byte of device memory. G_i is B_i scaled to
0..1. Algorithm 1 ranks by B, computes T', and ranks again until the affinities are stable (lines 1-15); then it fills
the device in that order (lines 16-31). It does not define T'; planner/transfers.py defines ours. T' depends on a
placement, which lines 6-15 do not have yet. So each ranking is filled at once (lines 16-31), and that placement gives
the next T'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from oallama.core.affinity_report import Affinity
from oallama.core.types import Operator
from oallama.cost.whole import Costs, OperatorCost, placement_seconds
from oallama.planner.placement import Placement, operator_rows
from oallama.planner.transfers import Transfers

AffinityRule = Literal["default", "paper"]
"""paper: T' is never negative, and the result is the placement that Algorithm 1 converged to (whole.search)."""

FillRule = Literal["continue", "full", "paper"]
"""continue (default): skip operators that do not fit or gain nothing on the device. full: then also fill the remaining
memory with operators that gain nothing (whole.fill_remaining). paper: place operators with or without gain, and stop
at the first that does not fit."""

MOST_ROUNDS = 50
"""Most rounds of lines 6-15 without a cycle. Three of 354 searches of the corpus reach it; eight rounds give the same
plans."""


def saved(t_cpu_s: float, t_gpu_s: float | None, t_transfer_s: float) -> float:
    """T_c - T_g - T': seconds saved on the device; minus infinity if it cannot compute the operator (T_g None)."""
    return -inf if t_gpu_s is None else t_cpu_s - t_gpu_s - t_transfer_s


def benefit(t_cpu_s: float, t_gpu_s: float | None, t_transfer_s: float, n_bytes: int) -> float:
    """B, lines 3 and 9: seconds saved per byte."""
    return saved(t_cpu_s, t_gpu_s, t_transfer_s) / max(1, n_bytes)


def benefits(costs: Sequence[OperatorCost], t_transfer: Sequence[float]) -> list[float]:
    """B of each operator; minus infinity if the device cannot compute it."""
    return [benefit(c.t_cpu_s, c.t_gpu_s, t, c.bytes) for c, t in zip(costs, t_transfer, strict=True)]


def normalise(benefits: Sequence[float]) -> tuple[float, ...]:
    """G, lines 5 and 11: B scaled to 0..1; equal values (or a single value) give 1.0 each."""
    low, high = min(benefits, default=0.0), max(benefits, default=0.0)
    return tuple((b - low) / (high - low) if high > low else 1.0 for b in benefits)


def rank(benefits: Sequence[float]) -> tuple[int, ...]:
    """Lines 5 and 11: indices by falling B; ties keep their (graph) order, so ranks are deterministic."""
    return tuple(sorted(range(len(benefits)), key=[-b for b in benefits].__getitem__))


def fill(order: Sequence[int], sizes: Sequence[int], budget: int, stops: bool = False) -> frozenset[int]:
    """Lines 17-24: take the items of `order` that fit `budget` bytes.

    order: item indices, best first; sizes: bytes of every item. stops: at the first that does not fit (line 21).
    """
    chosen, used = [], 0
    for item in order:
        if used + sizes[item] <= budget:
            used += sizes[item]
            chosen.append(item)
        elif stops:
            break
    return frozenset(chosen)


def algorithm_1(
    costs: Costs,
    budget: int,
    first_device_layer: int,
    *,
    transfers: Transfers,
    fill_rule: FillRule = "continue",
    affinity_rule: AffinityRule = "default",
) -> Placement:
    """Run Algorithm 1 over the operators of the layers from first_device_layer on, whose norms and KV are on the
    device. Ends when the placement is stable (converged), or when an earlier placement comes again (a cycle). Returns
    the placement with the least predicted time among all rounds.

    budget: bytes for the weights of operators (line 16: from 0.90 of the memory). affinity_rule "paper": return the
    stable placement, even if an earlier one is predicted faster; of a cycle, the fastest in it.
    """
    begin = costs.graph.first_operator(first_device_layer)
    operators, on_host = costs.operators[begin:], (False,) * begin
    sizes = [cost.bytes for cost in operators]
    least = -inf if fill_rule == "paper" else 0.0

    def ranked_and_filled(t_transfer: Sequence[float]) -> tuple[bool, ...]:
        gains = benefits(operators, t_transfer)
        chosen = fill([i for i in rank(gains) if gains[i] > least], sizes, budget, stops=fill_rule == "paper")
        return (*on_host, *map(chosen.__contains__, range(len(operators))))  # lines 25-30

    def ended(last: tuple[bool, ...], iteration: int, converged: bool) -> Placement:
        """The result. last: the placement at which the loop ended, or that came again."""
        placements = list(met)
        possible = placements[placements.index(last) :] if affinity_rule == "paper" else placements
        kept = min(possible, key=lambda seen: met[seen])
        return Placement.whole(kept, first_device_layer, met[kept], iteration, converged)

    placement = ranked_and_filled([0.0] * len(operators))  # lines 2-5
    met = {placement: placement_seconds(costs, placement, first_device_layer)}
    for iteration in range(1, MOST_ROUNDS + 1):  # line 6
        following = ranked_and_filled(transfers.of_all(placement, first_device_layer))  # lines 8-11
        if following in met:  # the same placement as before gives the same T': the affinities are stable (line 12)
            return ended(following, iteration, following == placement)
        met[following] = placement_seconds(costs, following, first_device_layer)
        placement = following
    return ended(placement, MOST_ROUNDS, False)


def affinities(
    costs: Costs, operators: Sequence[Operator], placement: Placement, rule: AffinityRule = "default"
) -> tuple[Affinity, ...]:
    """The report's rows, best rank first: T' and B of each operator, with all others where the placement has them."""
    transfers, rows = Transfers(costs, rule == "paper"), list[Affinity]()
    placed = operator_rows(operators, placement)
    for i, (o, cost, place) in enumerate(zip(operators, costs.operators, placed, strict=True)):
        times = cost.t_cpu_s, cost.t_gpu_s, transfers.of(placement.on_device, placement.first_device_layer, i)
        possible = cost.t_gpu_s is not None
        rows.append(
            Affinity(
                o.name, o.layer, o.role, o.type, o.shape, o.bytes, *times, saved(*times) if possible else None,
                benefit(*times, cost.bytes) if possible else None, 0.0, 0, place,
            )
        )  # fmt: skip
    return ranked(rows)


def ranked(rows: Sequence[Affinity]) -> tuple[Affinity, ...]:
    """The rows with G and their rank, best first."""
    benefits = [-inf if row.benefit_s_per_byte is None else row.benefit_s_per_byte for row in rows]
    normal = iter(normalise([b for b in benefits if b > -inf]))
    scaled = [replace(row, affinity=next(normal)) if b > -inf else row for row, b in zip(rows, benefits, strict=True)]
    return tuple(replace(scaled[i], rank=position) for position, i in enumerate(rank(benefits), start=1))
