"""The `split` policy: OATO decides what lies whole on the device; of what is left on the host, each block is split so
that both sides take as long (`balance`).

A slice needs nothing of llama.cpp on the device: no KV, no compute buffers, no layers. So OATO is asked for less and
less of the device's memory, down to none, and what it leaves goes to slices; the least predicted time wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from oallama.core.types import Phase, Workload
from oallama.place.balance import Balanced, balance
from oallama.place.baselines import Placed, cpu
from oallama.place.problem import SMALLEST_UBATCH, Decision, Problem, costs_of, operators_limit
from oallama.place.proposals import Beside, Proposal, decide_among

OATO_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the room for operators that OATO may fill; slices alone are another proposal."""


def decide_split(problem: Problem, asked: Workload, phase: Phase) -> Decision:
    """The verified placement of the split policy."""

    def alone(limit: int) -> list[Proposal]:
        return [balanced_alone(problem, asked, phase, limit)]

    def beside(room: Beside) -> Iterable[Placed]:
        for share in OATO_SHARES:
            placed = room.whole(share)
            if placed.first_device_layer > problem.graph.n_layer:
                return  # nothing gains as a whole
            yield balanced_beside(room, placed)

    return decide_among(problem, asked, phase, "split", alone, beside)


def balanced_beside(room: Beside, placed: Placed) -> Placed:
    """`placed` with slices in what it leaves."""
    return balance(room.costs, placed, *room.left(placed), room.load.n_ubatch).placed


def balanced_alone(problem: Problem, asked: Workload, phase: Phase, limit: int) -> Proposal:
    """Slices on the device and llama.cpp on the CPU alone. While memory is short, smaller micro-batches are tried: they
    leave more of it for weights."""
    cap = operators_limit(problem)
    weights_room = limit if cap is None else min(limit, cap)

    def proposed(load: Workload) -> tuple[Proposal, Balanced]:
        costs = costs_of(problem, load, phase, llama_uses_device=False)
        found = balance(costs, cpu(costs), limit, weights_room, load.n_ubatch)
        notes = (lowered_note(asked, load),) if load != asked else ()
        return Proposal(load, costs, found.placed, notes), found

    best, found = proposed(asked)
    load = asked
    while found.short and load.n_ubatch // 2 >= SMALLEST_UBATCH:
        load = replace(load, n_ubatch=load.n_ubatch // 2)
        other, found = proposed(load)
        if any(other.placed.gg) and other.placed.seconds < best.placed.seconds:
            best = other
    return best


def lowered_note(asked: Workload, load: Workload) -> str:
    return f"micro-batch lowered from {asked.n_ubatch} to {load.n_ubatch} tokens, which leaves room for slices"
