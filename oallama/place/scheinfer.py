"""The `scheinfer` policy: OATO decides what lies whole on the device; what is left on the host is sliced three ways,
into CC, CG and GG, and a prompt's tokens are shared out (slice_rest.py; ScheInfer, section IV).

As in split.py OATO is asked for several shares of the device's memory, and what it leaves goes to slices. Then one
joint refinement: around the best share it asks whether a little more or less of OATO's memory would buy more as slices.
The placements of `split` and `oato` are among the proposals, by the same prices, so none of them is predicted faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from oallama.core.types import Phase, Workload
from oallama.core.units import format_bytes
from oallama.cost.timeline import Prefetch
from oallama.place.baselines import Placed, cpu
from oallama.place.gg_assignment import N_VALUES
from oallama.place.problem import Decision, Problem, costs_of, operators_limit
from oallama.place.proposals import Beside, Proposal, decide_among
from oallama.place.slice_plan import SlicePlan
from oallama.place.slice_rest import Slicer, streamed_placement
from oallama.place.split import OATO_SHARES, balanced_alone, balanced_beside

COARSE_VALUES = 4
"""Values of r_GG while shares are compared; the chosen one is sliced at all N_VALUES."""

REFINEMENTS = (0.125, 0.0625)
"""Steps of OATO's share in which the neighbours of the best one are tried."""


def decide_scheinfer(problem: Problem, asked: Workload, phase: Phase, prefetch: Prefetch = Prefetch()) -> Decision:  # noqa: B008 - frozen
    """The verified placement of the scheinfer policy."""
    slicers: dict[Workload, Slicer] = {}

    def slicer(load: Workload) -> Slicer:
        if load not in slicers:
            slicers[load] = Slicer(problem, load, prefetch)
        return slicers[load]

    def sliced(load: Workload, placed: Placed, room: tuple[int, int], n_values: int) -> Placed | None:
        plan = slicer(load).rest(placed, *room, n_values)
        if plan is None:
            return None
        made = streamed_placement(problem, placed, plan, slicer(load).on)
        return replace(made, seconds=_phase_seconds(plan, load, phase))

    def alone(limit: int) -> Iterable[Proposal]:
        split = balanced_alone(problem, asked, phase, limit)
        yield split
        cap = operators_limit(problem)
        room = (limit, limit if cap is None else min(limit, cap))
        for load, notes in {asked: (), split.workload: split.notes}.items():
            costs = costs_of(problem, load, phase, llama_uses_device=False)
            placed = sliced(load, cpu(costs), room, N_VALUES)
            if placed is not None:
                yield Proposal(load, costs, placed, notes)

    def beside(room: Beside) -> Iterable[Placed]:
        tried: dict[float, Placed] = {}  # by share: the coarse slices
        whole: dict[float, Placed] = {}

        def look(share: float) -> None:
            if not 0 < share <= 1 or share in whole:
                return
            whole[share] = room.whole(share)
            if whole[share].first_device_layer <= problem.graph.n_layer:
                found = sliced(room.load, whole[share], room.left(whole[share]), COARSE_VALUES)
                tried[share] = found or whole[share]

        for share in OATO_SHARES:
            look(share)
            if share not in tried:
                break  # nothing gains as a whole
            yield whole[share]
            yield balanced_beside(room, whole[share])
        for step in REFINEMENTS:
            if tried:
                best = min(tried, key=lambda share: tried[share].seconds)
                look(best - step)
                look(best + step)
        if tried:
            best = min(tried, key=lambda share: tried[share].seconds)
            yield tried[best]
            yield balanced_beside(room, whole[best])
            fine = sliced(room.load, whole[best], room.left(whole[best]), N_VALUES)
            if fine is not None:
                yield fine

    decision = decide_among(problem, asked, phase, "scheinfer", alone, beside)
    return replace(decision, notes=(*decision.notes, *_notes(problem, decision.placed)))


def _phase_seconds(plan: SlicePlan, load: Workload, phase: Phase) -> float:
    """As the costs of the phase would price it."""
    return {"decode": plan.decode_s, "prefill": plan.prefill_s, "mixed": plan.total_s(load)}[phase]


def _notes(problem: Problem, placed: Placed) -> tuple[str, ...]:
    """What streaming from pageable memory costs, where the device has no other."""
    streams, link = placed.streams, problem.profile.link
    if streams is None or not (any(streams.cg) or streams.token_assignment):
        return ()
    if problem.profile.is_pinned:
        return ()
    rate = format_bytes(1 / link["h2d_pageable"].beta_s_per_byte)
    cost = f"{problem.profile.device} has no pinned host memory: weights are streamed from pageable memory, at {rate}/s"
    if problem.profile.is_blocking:
        cost += ", and the CPU waits for every copy"
    return (cost,)
