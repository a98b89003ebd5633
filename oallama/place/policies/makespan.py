"""Operations on two sides that work at the same time, so that the slower side is done as early as possible: the load
balancing problem of TwinPilots (Yu and Jiang, SYSTOR 2024), with memory on the device that saves loading.

Layers repeat, so what counts is how many operations of each kind lie where. HiGHS solves that as a linear program over
integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Any

MOST_NODES = 20_000
"""Most nodes of the solver's tree. Where they are not enough, the best placement found comes with a bound."""

SCALE = 1e3
"""Value of all operations' CPU seconds in the linear program, whose tolerances of 1e-6 are absolute."""

SMALLEST = 1e-9  # coefficient that the solver takes
LEAST_S = 1e-300  # below it seconds count as none

ROUNDING = 1e-8  # of the bound: what the solver's tolerances may leave

CPU, STREAMED, RESIDENT = range(3)
"""Sides of an operation: on the CPU; on the device, loaded for each pass; on the device, where its weights stay."""

Counts = tuple[int, int, int]
"""Number of operations of a kind on each side."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that runs whole on one side. None: it cannot run there."""

    bytes: int  # of the device, where it is resident
    cpu_s: float
    streamed_s: float | None  # loading and computing
    resident_s: float | None

    @property
    def without_waste(self) -> Operation:
        """The same, not resident where that saves nothing."""
        if self.streamed_s is None or self.resident_s is None or self.resident_s < self.streamed_s:
            return self
        return replace(self, resident_s=None)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """By where it is; infinite where it cannot be."""
        return self.cpu_s, _or_inf(self.streamed_s), _or_inf(self.resident_s)


@dataclass(frozen=True, slots=True)
class Makespan:
    """The side of each operation, and the seconds until both sides are done if neither waits for the other."""

    sides: tuple[int, ...]
    cpu_s: float
    device_s: float
    bound_s: float  # of no placement the makespan is less

    @property
    def seconds(self) -> float:
        return max(self.cpu_s, self.device_s)

    @property
    def is_least(self) -> bool:
        """Whether it is known that there is no better one."""
        return self.seconds <= self.bound_s * (1 + ROUNDING)


def least_makespan(operations: Sequence[Operation], room: int, most_nodes: int = MOST_NODES) -> Makespan:
    """The placement with the least makespan of which no more than `room` bytes are resident.

    Each kind's operations on one side lie evenly among the others, so that either side has something to do all along.
    """
    kinds: dict[Operation, list[int]] = {}
    for i, operation in enumerate(operations):
        kinds.setdefault(operation.without_waste, []).append(i)
    listed = sorted(kinds, key=lambda kind: (kind.seconds, kind.bytes))
    counts, bound_s = _least_counts(listed, [len(kinds[kind]) for kind in listed], max(0, room), most_nodes)
    sides = [CPU] * len(operations)
    for kind, count in zip(listed, counts, strict=True):
        for i, side in zip(kinds[kind], _evenly(count), strict=True):
            sides[i] = side
    taken = [(side == CPU, operation.seconds[side]) for operation, side in zip(operations, sides, strict=True)]
    cpu_s, device_s = (sum(seconds for on_cpu, seconds in taken if on_cpu is of_cpu) for of_cpu in (True, False))
    return Makespan(tuple(sides), cpu_s, device_s, min(bound_s, max(cpu_s, device_s)))


def _least_counts(
    kinds: Sequence[Operation], counts: Sequence[int], room: int, most_nodes: int
) -> tuple[list[Counts], float]:
    """(counts of each kind by side, what no makespan is less than; infinite where these are the least)."""
    import highspy

    total_s = sum(kind.cpu_s * count for kind, count in zip(kinds, counts, strict=True))
    if total_s < LEAST_S:
        return [(count, 0, 0) for count in counts], inf
    unit = gcd(*(kind.bytes for kind in kinds)) or 1  # bytes, of which every size is a whole number
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0),
                          ("mip_max_nodes", most_nodes)):  # fmt: skip
        solver.setOptionValue(option, value)
    makespan = solver.addVariable(lb=0)
    on_side: list[list[Any]] = []
    busy: dict[bool, list[Any]] = {True: [], False: []}  # by whether it is the CPU
    for kind, count in zip(kinds, counts, strict=True):
        own = []
        for side, seconds in enumerate(kind.seconds):
            worth_it = seconds <= total_s  # what takes longer than all on the CPU is in no least makespan
            own.append(solver.addIntegral(lb=0, ub=count if worth_it else 0))
            if worth_it and SCALE * seconds / total_s > SMALLEST:
                busy[side == CPU].append(own[side] * (SCALE * seconds / total_s))
        solver.addConstr(solver.qsum(own) == count)
        on_side.append(own)
    for of_side in busy.values():
        solver.addConstr(makespan - solver.qsum(of_side) >= 0)
    resident = [own[RESIDENT] * (kind.bytes // unit) for own, kind in zip(on_side, kinds, strict=True)]
    solver.addConstr(solver.qsum(resident) <= room // unit)
    solver.minimize(makespan)
    info = solver.getInfo()
    values = solver.getSolution().col_value
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return [(count, 0, 0) for count in counts], 0.0
    cpu, streamed, there = ([round(values[own[side].index]) for own in on_side] for side in range(3))
    ended = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return list(zip(cpu, streamed, there, strict=True)), inf if ended else info.mip_dual_bound * total_s / SCALE


def _evenly(count: Counts) -> Iterator[int]:
    """Sides in the order of the graph, each as evenly as its count allows."""
    left, owed, n = list(count), [0.0, 0.0, 0.0], sum(count)
    for _ in range(n):
        owed = [due + each / n for due, each in zip(owed, count, strict=True)]
        side = max((side for side in range(3) if left[side]), key=lambda side: owed[side])
        owed[side] -= 1
        left[side] -= 1
        yield side


def _or_inf(seconds: float | None) -> float:
    return inf if seconds is None else seconds
