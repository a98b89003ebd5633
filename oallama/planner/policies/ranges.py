"""The policy of several devices: a range of layers for each, of whole operators (planner/ranges.py), and splits beside
the first.

The ranges of whole operators are the best that there are. Splits are searched for from there: the first device's
layers, up to a border, are planned as a model of their own, as one device's are (planner/parts.py, policies/sliced.py),
in the memory that it has; what is behind the border has whole operators on the other devices. Borders are looked at
downhill, with few choices of cuts, then the best one with all of them. Splits are beside the first device alone, as
llama.cpp computes large batches of what the host has there.

It is none of `--policy`: with several devices, Placer.plan compares it with the best plan on each of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from math import inf

from oallama.core.errors import DoesNotFit
from oallama.core.types import StreamSettings
from oallama.cost.passes import passes
from oallama.planner.cutting import downhill
from oallama.planner.memory import CorrectedBudget, DeviceMemory
from oallama.planner.parts import problem_in
from oallama.planner.placement import Placement, VerifiedPlan
from oallama.planner.policies.registry import ROUNDS, MemoryBudget, Policy, Request
from oallama.planner.policies.sliced import most_choices
from oallama.planner.problem import LoadBytes, Problem, costs_of, device_costs, memory_before, operators_on_host
from oallama.planner.ranges import WholeRanges
from oallama.planner.slicer import Slicer
from oallama.planner.verify import on_cpu, verify

NAME = "ranges"

FIRST_STRIDE = 8
"""The first steps of the search for a border are this share of the layers."""

Propose = Callable[[WholeRanges, DeviceMemory], Placement]
"""(ranges of whole operators in each device's memory, the first device's) -> a placement."""


def best_over(problem: Problem, asked: Request) -> VerifiedPlan:
    """The fastest placement over the problem's devices that fits each, by no_alloc loads as best_verified has them; on
    the CPU where fewer than two devices would be used. Raises DoesNotFit where none fits."""
    before = [
        device.no_alloc_load(asked.workload, operators_on_host(device, asked.workload)) for device in problem.devices
    ]
    whole = _best(problem, asked, before, lambda ranges, _: ranges.best())
    if whole is None:
        return on_cpu(problem, asked.workload, asked.phase)
    try:
        first, n_layers = whole.placement.first_device_layer, whole.placement.device_layers[0]
        split = _best(problem, asked, before, _Splits(problem, asked, first + n_layers)) if n_layers else None
    except DoesNotFit:
        return whole
    return min(filter(None, (whole, split)), key=lambda found: found.placement.seconds)


def _best(problem: Problem, asked: Request, before: Sequence[LoadBytes], propose: Propose) -> VerifiedPlan | None:
    """The fastest that is proposed and fits; None where it uses fewer than two devices. before: what each device's load
    takes without operators. Raises DoesNotFit."""
    workload, n_layer = asked.workload, problem.graph.n_layer
    costs = device_costs(problem, passes(workload, asked.phase))
    corrected = [
        CorrectedBudget(memory_before(device, workload, taken))
        for device, taken in zip(problem.devices, before, strict=True)
    ]
    best: VerifiedPlan | None = None
    for _ in range(ROUNDS):
        memories = [budget.memory for budget in corrected]
        ranges = WholeRanges(costs, problem.operators, [partial(_bytes_left, memory) for memory in memories])
        placement = propose(ranges, memories[0])
        if len(placement.devices_used) < 2:
            return best
        if best is not None and placement.seconds >= best.placement.seconds:
            return best
        last = verify(problem, NAME, workload, placement)
        if last.memory.fits:
            best = last
        learned = [
            budget.learn(n_layer - n_blocks, n_bytes, real)
            for budget, (n_blocks, n_bytes), real in zip(
                corrected, on_each(problem, placement), last.memory.devices, strict=True
            )
        ]
        if not any(learned):
            break
    if best is not None:
        return best
    worst = min(range(len(problem.devices)), key=lambda i: last.memory.devices[i].spare)
    real = last.memory.devices[worst]
    raise DoesNotFit(
        real.limit - real.spare, real.limit, problem.devices[worst].profile.device, f"the {NAME} placement"
    )


def _bytes_left(memory: DeviceMemory, n_blocks: int) -> int:
    """Return the bytes left for operators beside the norms and KV of n_blocks layers."""
    return memory.operator_budget(memory.n_layer - n_blocks)


def on_each(problem: Problem, placement: Placement) -> list[tuple[int, int]]:
    """(blocks, bytes of operators and slices, with what these need) of each device."""
    begins, graph = accumulate(placement.device_layers, initial=placement.first_device_layer), problem.graph
    found: list[tuple[int, int]] = []
    for begin, n_layers in zip(begins, placement.device_layers, strict=False):
        first, last = graph.operators_of((begin, begin + n_layers))
        on_device = zip(problem.operators[first:last], placement.on_device[first:last], strict=True)
        n_blocks = max(0, min(begin + n_layers, graph.n_layer) - begin)
        slices = 0 if found else placement.device_bytes
        found.append((n_blocks, slices + sum(operator.bytes for operator, here in on_device if here)))
    return found


class _Splits:
    """Proposes splits beside the first device, and the best of the other layers on the devices behind it. Once a
    placement was verified, the borders beside its own are looked at."""

    def __init__(self, problem: Problem, asked: Request, border: int) -> None:
        """border: from where the search goes downhill."""
        self._problem, self._asked, self._border = problem, asked, border
        self._stride = max(1, problem.graph.n_layer // FIRST_STRIDE)
        self._parts = cache(self._part)

    def __call__(self, ranges: WholeRanges, memory: DeviceMemory) -> Placement:
        @cache
        def seconds(border: int) -> float:
            return self._placed(ranges, memory, border, quick=True).seconds

        self._border = downhill(seconds, self._border, self._stride, 1, self._problem.graph.n_layer)
        self._stride = 1
        if seconds(self._border) == inf:
            return _NOTHING
        return self._placed(ranges, memory, self._border, quick=False)

    def _placed(self, ranges: WholeRanges, memory: DeviceMemory, border: int, quick: bool) -> Placement:
        asked, part = replace(self._asked, quick=quick), self._parts(border)
        budget = MemoryBudget(
            asked, asked.workload, costs_of(part, asked.workload, asked.phase), memory.of_layers(border),
            cache(partial(Slicer, part, streaming=StreamSettings(prefetch=asked.rules.prefetch))), may_be_bare=True,
        )  # fmt: skip
        found = [
            placement for placement in most_choices(part, budget)
            if placement.is_sliced or placement.first_device_layer < border
        ]  # fmt: skip
        if not found:
            return _NOTHING
        return ranges.behind_first(min(found, key=lambda placement: placement.seconds), border)

    def _part(self, border: int) -> Problem:
        return problem_in(self._problem, 0, (0, border))


_NOTHING = Placement((), 0, inf)

ranges = Policy(NAME, "a range of layers for each of several devices", best_over)
