"""Choosing among placements with slices: proposed with predicted costs, verified by what a load really takes.

What llama.cpp takes beside whole operators is only known from a load, so these are proposed again with less room while
they do not fit. Slices alone need nothing of llama.cpp on the device, and fit by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from oallama.core.types import Phase, Workload
from oallama.cost.predict import Costs
from oallama.place.baselines import Placed
from oallama.place.budget import DeviceMemory
from oallama.place.oato import search
from oallama.place.problem import (
    Decision,
    Problem,
    capacity_of,
    costs_of,
    device_memory,
    measured,
    nothing_placed,
    predicted_of,
)

VERIFY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement that has not been verified, and the workload it is for: its micro-batch may be lowered."""

    workload: Workload
    costs: Costs
    placed: Placed
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beside:
    """What there is to place whole operators in, and slices beside them."""

    problem: Problem
    costs: Costs
    memory: DeviceMemory
    load: Workload
    overrun: int  # bytes that the last verified proposal took too much

    def whole(self, share: float) -> Placed:
        """OATO's placement in so much of the room for whole operators."""

        def budget(first_device_layer: int) -> int:
            room = self.memory.operator_room(first_device_layer) - self.overrun
            return int(share * room) if room > 0 else room

        return search(self.costs, self.problem.operators, budget)

    def left(self, placed: Placed) -> tuple[int, int]:
        """(bytes that `placed` leaves for slices and activations, for slices alone)."""
        there = zip(self.problem.operators, placed.on_device, strict=True)
        whole = sum(operator.bytes for operator, on_device in there if on_device)
        free = self.memory.room(placed.first_device_layer) - self.overrun - whole
        cap = self.memory.operators_limit
        return free, free if cap is None else min(free, cap - whole)


def decide_among(
    problem: Problem,
    asked: Workload,
    phase: Phase,
    policy: str,
    alone: Callable[[int], Iterable[Proposal]],
    beside: Callable[[Beside], Iterable[Placed]],
) -> Decision:
    """The verified placement with the least predicted time.

    alone: slices with llama.cpp on the CPU, given the bytes the device may hold; beside: placements with whole
    operators.
    """
    capacity = capacity_of(problem, asked)
    by_themselves = list(alone(int(problem.vram_fill * capacity)))
    memory, load, notes = (None, asked, ()) if problem.slices_only else device_memory(problem, asked, required=False)
    costs = costs_of(problem, load, phase)
    overrun = 0
    for verified in range(VERIFY_ROUNDS + 1):
        proposals = list(by_themselves)
        if memory is not None and verified < VERIFY_ROUNDS:
            found = beside(Beside(problem, costs, memory, load, overrun))
            proposals = [*(Proposal(load, costs, placed, notes) for placed in found), *by_themselves]
        best = min(proposals, key=lambda proposal: proposal.placed.seconds)
        if not best.placed.uses_device(problem.graph.n_layer):
            break
        real = measured(problem, best.workload, best.placed, capacity)
        if real.spare >= 0:
            predicted = predicted_of(problem, best.workload, best.placed)
            return Decision(policy, best.workload, best.costs, best.placed, real, predicted, best.notes)
        overrun -= real.spare
    reason = f"no operator, and no part of one, is predicted to make it faster on {problem.profile.device}"
    return nothing_placed(problem, policy, asked, phase, capacity, reason)
