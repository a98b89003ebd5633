"""The `split` policy: OATO decides what lies whole on the device; of what is left on the host, each block is split so
that both sides take as long (`balance`).

A slice needs nothing of llama.cpp on the device: no KV, no compute buffers, no layers. So OATO is asked for less and
less of the device's memory, down to none, and what it leaves goes to slices; the least predicted time wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from oallama.core.types import Phase, Workload
from oallama.cost.predict import Costs
from oallama.place.balance import Balanced, balance
from oallama.place.baselines import Placed, cpu
from oallama.place.budget import DeviceMemory
from oallama.place.oato import search
from oallama.place.problem import (
    SMALLEST_UBATCH,
    Decision,
    Problem,
    capacity_of,
    costs_of,
    device_memory,
    measured,
    nothing_placed,
    operators_limit,
    predicted_of,
)

OATO_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the room for operators that OATO may fill; slices alone are another proposal."""

VERIFY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement that has not been verified, and the workload it is for: its micro-batch may be lowered."""

    workload: Workload
    costs: Costs
    placed: Placed
    notes: tuple[str, ...]


def decide_split(problem: Problem, asked: Workload, phase: Phase) -> Decision:
    """The verified placement of the split policy. What llama.cpp takes beside whole operators is only known from a
    load, so these are proposed again with less room while they do not fit; slices alone fit by construction."""
    capacity = capacity_of(problem, asked)
    alone = _slices_alone(problem, asked, phase, int(problem.vram_fill * capacity))
    memory, load, notes = (None, asked, ()) if problem.slices_only else device_memory(problem, asked, required=False)
    costs = costs_of(problem, load, phase)
    overrun = 0
    for verified in range(VERIFY_ROUNDS + 1):
        proposals = [alone]
        if memory is not None and verified < VERIFY_ROUNDS:
            beside = _beside_oato(problem, costs, memory, load, overrun)
            proposals = [*(Proposal(load, costs, placed, notes) for placed in beside), alone]
        best = min(proposals, key=lambda proposal: proposal.placed.seconds)
        if not best.placed.uses_device(problem.graph.n_layer):
            break
        real = measured(problem, best.workload, best.placed, capacity)
        if real.spare >= 0:
            predicted = predicted_of(problem, best.workload, best.placed)
            return Decision("split", best.workload, best.costs, best.placed, real, predicted, best.notes)
        overrun -= real.spare
    reason = f"no operator, and no part of one, is predicted to make it faster on {problem.profile.device}"
    return nothing_placed(problem, "split", asked, phase, capacity, reason)


def _slices_alone(problem: Problem, asked: Workload, phase: Phase, limit: int) -> Proposal:
    """Slices on the device and llama.cpp on the CPU alone. While memory is short, smaller micro-batches are tried: they
    leave more of it for weights."""
    cap = operators_limit(problem)
    weights_room = limit if cap is None else min(limit, cap)

    def proposed(load: Workload) -> tuple[Proposal, Balanced]:
        costs = costs_of(problem, load, phase, llama_uses_device=False)
        found = balance(costs, cpu(costs), limit, weights_room, load.n_ubatch)
        lowered = f"micro-batch lowered from {asked.n_ubatch} to {load.n_ubatch} tokens, which leaves room for slices"
        return Proposal(load, costs, found.placed, (lowered,) if load != asked else ()), found

    best, found = proposed(asked)
    load = asked
    while found.short and load.n_ubatch // 2 >= SMALLEST_UBATCH:
        load = replace(load, n_ubatch=load.n_ubatch // 2)
        other, found = proposed(load)
        if any(other.placed.gg) and other.placed.seconds < best.placed.seconds:
            best = other
    return best


def _beside_oato(
    problem: Problem, costs: Costs, memory: DeviceMemory, load: Workload, overrun: int
) -> Iterator[Placed]:
    """Placements of whole operators in a share of the room, with slices in what is left of it."""
    for share in OATO_SHARES:

        def budget(first_device_layer: int, share: float = share) -> int:
            room = memory.operator_room(first_device_layer) - overrun
            return int(share * room) if room > 0 else room

        placed = search(costs, problem.operators, budget)
        if placed.first_device_layer > problem.graph.n_layer:
            return  # nothing gains as a whole
        whole = sum(op.bytes for op, there in zip(problem.operators, placed.on_device, strict=True) if there)
        free = memory.room(placed.first_device_layer) - overrun - whole
        cap = memory.operators_limit
        yield balance(costs, placed, free, free if cap is None else min(free, cap - whole), load.n_ubatch).placed
