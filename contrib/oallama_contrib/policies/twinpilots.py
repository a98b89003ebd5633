"""The `twinpilots` policy, to compare with: whole operations on the CPU or on the device, their weights loaded there
for each pass, so that the side that takes longer takes the least (Yu and Jiang, TwinPilots, SYSTOR 2024: S_cpu, S_gpu
and the makespan λ of a plan D).

Layers repeat, so what counts is how many operations of each kind lie where. HiGHS solves that as a linear program over
integers.

Ours are modules: a linear operator of attention, a whole FFN, whatever cannot be cut. Their times are those of the
profile over the passes of the workload, each side alone; TwinPilots takes them from its history of the same batch size
and length. A module whose weights stay in the device's memory has nothing to load, which is a third choice while memory
lasts. The makespan says when both sides would be done if neither waited for the other. Operators run in graph order, so
a plan's own time is what the timeline says, and norms, attention and joins come on top. Only its copies may run beside
the device's own work, which S_gpu counts one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Any

from oallama.core.errors import UsageError
from oallama.core.units import format_seconds
from oallama.planner.placement import Placement, all_on_cpu
from oallama.planner.policies.registry import PolicyInputs, policy
from oallama.planner.problem import Problem
from oallama.planner.slicer import Slicer
from oallama_contrib.policies.flexgen import streamed
from oallama_contrib.policies.modules import Module, modules_in, on_cpu, placed_modules, staging_of

MOST_NODES = 20_000
"""Most nodes of the solver's tree. Where they are not enough, the best placement found is taken."""

SCALE = 1e3
"""Value of all operations' CPU seconds in the linear program, whose tolerances of 1e-6 are absolute."""

SMALLEST = 1e-9  # coefficient that the solver takes

CPU, STREAMED, RESIDENT = range(3)
"""Sides of an operation: on the CPU; on the device, loaded for each pass; on the device, where its weights stay."""

Counts = tuple[int, int, int]
"""Number of operations of a kind on each side."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that runs whole on one side; infinite seconds where it cannot run."""

    bytes: int  # of the device, where it is resident
    cpu_s: float
    streamed_s: float  # loading and computing
    resident_s: float

    @property
    def without_waste(self) -> Operation:
        """The same, not resident where that saves nothing."""
        return self if self.resident_s < self.streamed_s else replace(self, resident_s=inf)

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.cpu_s, self.streamed_s, self.resident_s


@dataclass(frozen=True, slots=True)
class Makespan:
    """The side of each operation, and the seconds until both sides are done if neither waits for the other."""

    sides: tuple[int, ...]
    cpu_s: float
    device_s: float

    @property
    def seconds(self) -> float:
        return max(self.cpu_s, self.device_s)


def least_makespan(operations: Sequence[Operation], budget: int) -> Makespan:
    """The placement with the least makespan of which no more than `budget` bytes are resident.

    Each kind's operations on one side lie evenly among the others, so that either side has something to do all along.
    """
    kinds: dict[Operation, list[int]] = {}
    for i, operation in enumerate(operations):
        kinds.setdefault(operation.without_waste, []).append(i)
    listed = sorted(kinds, key=lambda kind: (kind.seconds, kind.bytes))
    counts = _least_counts(listed, [len(kinds[kind]) for kind in listed], max(0, budget))
    sides = [CPU] * len(operations)
    for kind, count in zip(listed, counts, strict=True):
        for i, side in zip(kinds[kind], _evenly(count), strict=True):
            sides[i] = side
    times = [(side == CPU, operation.seconds[side]) for operation, side in zip(operations, sides, strict=True)]
    cpu_s, device_s = (sum(seconds for on_cpu, seconds in times if on_cpu is of_cpu) for of_cpu in (True, False))
    return Makespan(tuple(sides), cpu_s, device_s)


def _least_counts(kinds: Sequence[Operation], counts: Sequence[int], budget: int) -> list[Counts]:
    """Counts of each kind by side. Raises UsageError without HiGHS."""
    try:
        import highspy
    except ImportError:
        raise UsageError("policy twinpilots needs HiGHS; install it: pip install 'oallama[twinpilots]'") from None
    total_s = sum(kind.cpu_s * count for kind, count in zip(kinds, counts, strict=True))
    if not total_s:
        return [(count, 0, 0) for count in counts]
    unit = gcd(*(kind.bytes for kind in kinds)) or 1  # bytes, of which every size is a whole number
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0),
                          ("mip_max_nodes", MOST_NODES)):  # fmt: skip
        solver.setOptionValue(option, value)
    makespan = solver.addVariable(lb=0)
    on_side: list[list[Any]] = []
    busy: dict[bool, list[Any]] = {True: [], False: []}  # by whether it is the CPU
    for kind, count in zip(kinds, counts, strict=True):
        variables = []
        for side, seconds in enumerate(kind.seconds):
            worth_it = seconds <= total_s  # what takes longer than all on the CPU is in no least makespan
            variables.append(solver.addIntegral(lb=0, ub=count if worth_it else 0))
            if worth_it and SCALE * seconds / total_s > SMALLEST:
                busy[side == CPU].append(variables[side] * (SCALE * seconds / total_s))
        solver.addConstr(solver.qsum(variables) == count)
        on_side.append(variables)
    for of_side in busy.values():
        solver.addConstr(makespan - solver.qsum(of_side) >= 0)
    resident = [variables[RESIDENT] * (kind.bytes // unit) for variables, kind in zip(on_side, kinds, strict=True)]
    solver.addConstr(solver.qsum(resident) <= budget // unit)
    solver.minimize(makespan)
    values = solver.getSolution().col_value
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return [(count, 0, 0) for count in counts]
    cpu, streamed, residents = ([round(values[variables[side].index]) for variables in on_side] for side in range(3))
    return list(zip(cpu, streamed, residents, strict=True))


def _evenly(count: Counts) -> Iterator[int]:
    """Sides in the order of the graph, each as evenly as its count allows."""
    n_left, deficits, n = list(count), [0.0, 0.0, 0.0], sum(count)
    for _ in range(n):
        deficits = [deficit + n_side / n for deficit, n_side in zip(deficits, count, strict=True)]
        side = max((side for side in range(3) if n_left[side]), key=lambda side: deficits[side])
        deficits[side] -= 1
        n_left[side] -= 1
        yield side


@policy(
    "twinpilots", "whole operators on either side, with the least makespan", streams=True,
    keeps_ubatch=True,
    caveat="TwinPilots' plan for one workload: without history, and without planning while it runs",
)  # fmt: skip
def twinpilots(problem: Problem, inputs: PolicyInputs) -> Iterable[Placement]:
    """The modules on the sides of the least makespan, which the placement's notes say."""
    slicer, modules = modules_in(problem, inputs, streamed)
    makespan = module_makespan(slicer, inputs, modules)
    if makespan is None or set(makespan.sides) == {CPU}:
        yield all_on_cpu(inputs.costs)
        return
    assigned = [
        module if side == STREAMED or module.cut is None else on_cpu(module)
        for module, side in zip(modules, makespan.sides, strict=False)
    ]
    residents = [i for i, side in enumerate(makespan.sides) if side == RESIDENT]
    placement = placed_modules(slicer, inputs, assigned, residents, staging_of(slicer, assigned))
    yield replace(placement, notes=(_note(makespan, placement.seconds),))


def module_makespan(slicer: Slicer, inputs: PolicyInputs, modules: Sequence[Module]) -> Makespan | None:
    """The least makespan of the modules, which come first in it, and of what always stays on the host. The larger what
    may be streamed, the less may stay. None: not even nothing that is streamed fits."""
    in_modules = {i for module in modules for i in module.operators}
    operators, (budget, weights_budget) = inputs.costs.operators, inputs.cut_bytes()
    of_host = [Operation(0, cost.t_cpu_s, inf, inf) for i, cost in enumerate(operators) if i not in in_modules]
    sizes = [0 if module.cut is None else staging_of(slicer, [module]) for module in modules]
    best: Makespan | None = None
    for largest in sorted({0, *sizes}):
        may_be_streamed = [m.cut is not None and size <= largest for m, size in zip(modules, sizes, strict=True)]
        # whichever of them are streamed: each as if it were followed by its like
        twice = [(module, module) for module, may in zip(modules, may_be_streamed, strict=True) if may]
        staging = staging_of(slicer, [module for pair in twice for module in pair])
        if staging > max(0, budget):
            break
        operations = [
            _operation(slicer, inputs, module, may) for module, may in zip(modules, may_be_streamed, strict=True)
        ]
        makespan = least_makespan([*operations, *of_host], min(budget - staging, weights_budget))
        best = makespan if best is None else min(best, makespan, key=lambda candidate: candidate.seconds)
    return best


def _operation(slicer: Slicer, inputs: PolicyInputs, module: Module, may_be_streamed: bool) -> Operation:
    """A module over the passes of the workload: gpu_i with loading, and without."""
    costs = inputs.costs
    costs_of_module = [costs.operators[i] for i in module.operators]
    device_s = sum(cost.t_gpu_s for cost in costs_of_module if cost.t_gpu_s is not None)
    loaded_s = 0.0
    if module.cut is not None:
        kind, line = module.cut[0], slicer.pricing.rates.weights
        for p in costs.passes:
            rows = p.n_outputs if kind.outputs_only else p.n_tokens
            loaded_s += p.count * line.seconds(kind.gemms.streamed(1.0, rows).bytes) if rows else 0.0
    layer = costs.graph.operator_layer[module.operators[0]]
    return Operation(
        module.bytes,
        sum(cost.t_cpu_s for cost in costs_of_module),
        device_s + loaded_s if may_be_streamed else inf,
        device_s if layer >= inputs.first_device_layer else inf,
    )


def _note(makespan: Makespan, seconds: float) -> str:
    """The makespan beside the plan's own time, both over the workload."""
    sides = f"CPU {format_seconds(makespan.cpu_s)}, device with its loading {format_seconds(makespan.device_s)}"
    return (
        f"makespan {format_seconds(makespan.seconds)} if neither side waited for the other ({sides}); "
        f"in graph order it is predicted to take {format_seconds(seconds)}"
    )
