"""The policy of several devices: a range of layers for each, of whole operators (planner/ranges.py), and slices on each
local device.

The ranges of whole operators are optimal (a dynamic program). Splits are a local search that starts from them: the
layers of each local device, between two borders, are planned as for a single device (planner/parts.py,
policies/sliced.py), in its memory. A device of another machine has whole layers, after all others. Borders move one at
a time, downhill, with few options of cuts; the best borders are then planned with all options.

It has no name for `--policy`: with several devices Placer.plan compares it with the best plan on each device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from math import inf

from oallama.core.errors import DoesNotFit
from oallama.core.types import StreamSettings
from oallama.cost.passes import passes
from oallama.planner.cutting import downhill
from oallama.planner.memory import CorrectedMemory, DeviceMemory
from oallama.planner.parts import Window, problem_in
from oallama.planner.placement import NO_PLACEMENT, Placement, VerifiedPlan, whole_bytes
from oallama.planner.policies.registry import ROUNDS, Policy, PolicyInputs, Request
from oallama.planner.policies.sliced import most_choices
from oallama.planner.problem import LoadBytes, Problem, costs_of, device_costs, memory_before, operators_on_host
from oallama.planner.ranges import DevicePart, WholeRanges
from oallama.planner.slicer import Slicer, pricing_of
from oallama.planner.verify import on_cpu, verify

NAME = "ranges"

FIRST_STRIDE = 8
"""The first steps of the search for a border are this share of the layers."""

Propose = Callable[[WholeRanges, Sequence[DeviceMemory]], Placement]
"""(ranges of whole operators in each device's memory, that memory) -> a placement."""


def best_over(problem: Problem, request: Request) -> VerifiedPlan:
    """The fastest placement over the problem's devices that fits all of them, verified as by best_verified; on the CPU
    if fewer than two devices would be used. Raises DoesNotFit if none fits and the request requires one."""
    empty_loads = [
        device.no_alloc_load(request.workload, operators_on_host(device, request.workload))
        for device in problem.devices
    ]
    whole = _best(problem, request, empty_loads, lambda ranges, _: ranges.best())
    if whole is None:
        return on_cpu(problem, request.workload, request.phase)
    optional = replace(request, required=False)
    split = _best(problem, optional, empty_loads, _Splits(problem, request, whole.placement))
    return min(filter(None, (whole, split)), key=lambda candidate: candidate.placement.seconds)


def _best(
    problem: Problem, request: Request, empty_loads: Sequence[LoadBytes], propose: Propose
) -> VerifiedPlan | None:
    """The fastest proposal that fits; None if it uses fewer than two devices, or if none fits and the request does not
    require one. empty_loads: of each device without operators. Raises DoesNotFit."""
    workload, n_layer = request.workload, problem.graph.n_layer
    costs = device_costs(problem, passes(workload, request.phase))
    corrected = [
        CorrectedMemory(memory_before(device, workload, load))
        for device, load in zip(problem.devices, empty_loads, strict=True)
    ]
    best: VerifiedPlan | None = None
    for _ in range(ROUNDS):
        memories = [device.memory for device in corrected]
        ranges = WholeRanges(costs, problem.operators, [partial(_bytes_left, memory) for memory in memories])
        placement = propose(ranges, memories)
        if len(placement.devices_used) < 2:
            return best
        if best is not None and placement.seconds >= best.placement.seconds:
            return best
        last = verify(problem, NAME, workload, placement)
        if last.memory.fits:
            best = last
        learned = [
            device.learn(n_layer - n_layers, n_bytes, real)
            for device, (n_layers, n_bytes), real in zip(
                corrected, on_each(problem, placement), last.memory.devices, strict=True
            )
        ]
        if not any(learned):
            break
    if best is not None or not request.required:
        return best
    worst = min(range(len(problem.devices)), key=lambda i: last.memory.devices[i].spare)
    real = last.memory.devices[worst]
    raise DoesNotFit(
        real.limit - real.spare, real.limit, problem.devices[worst].profile.device, f"the {NAME} placement"
    )


def _bytes_left(memory: DeviceMemory, n_layers: int) -> int:
    """Bytes left for operators beside norms and KV of n_layers layers."""
    return memory.operator_budget(memory.n_layer - n_layers)


def on_each(problem: Problem, placement: Placement) -> list[tuple[int, int]]:
    """(number of layers, bytes of operators and of slices with their staging) of each device."""
    used: list[tuple[int, int]] = []
    for (begin, end), slices in zip(placement.device_ranges, placement.device_slices, strict=False):
        first, last = problem.graph.operators_of((begin, end))
        n_bytes = whole_bytes(problem.operators[first:last], placement.on_device[first:last])
        used.append((max(0, min(end, problem.graph.n_layer) - begin), n_bytes + slices.device_bytes))
    return used


class _Splits:
    """Proposes slices on each local device, and the best whole layers on devices of other machines. After a placement
    was verified, tries borders near its own."""

    def __init__(self, problem: Problem, request: Request, whole: Placement) -> None:
        """whole: ranges of whole operators, from whose borders the search starts."""
        self._problem, self._request = problem, request
        self._n_local = sum(not device.profile.is_remote for device in problem.devices)
        self._borders = tuple(end for _, end in whole.device_ranges[: self._n_local])
        self._n_layers = problem.graph.n_layer + 1
        self._stride = max(1, problem.graph.n_layer // FIRST_STRIDE)
        self._problems = cache(partial(problem_in, problem))
        streaming = StreamSettings(prefetch=request.rules.prefetch)
        self._pricing = cache(lambda device: pricing_of(problem.devices[device], streaming))

    def __call__(self, ranges: WholeRanges, memories: Sequence[DeviceMemory]) -> Placement:
        @cache
        def part(device: int, window: Window, quick: bool) -> Placement:
            return self._part(memories[device], device, window, quick)

        @cache
        def placed(borders: tuple[int, ...], quick: bool) -> Placement:
            return self._placed(ranges, partial(part, quick=quick), borders)

        movable = len(self._borders) - (self._n_local == len(self._problem.devices))  # the last layer has a device
        visited: set[tuple[int, ...]] = set()
        while self._borders not in visited:
            visited.add(self._borders)
            for number in range(movable):
                self._borders = self._moved(number, lambda borders: placed(borders, True).seconds)
        self._stride = 1
        if placed(self._borders, True).seconds == inf:
            return NO_PLACEMENT
        return placed(self._borders, False)

    def _moved(self, number: int, seconds: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
        """The borders with one of them moved to a local minimum."""
        lower, higher = self._borders[:number], self._borders[number + 1 :]
        least, most = (0, *lower)[-1], (*higher, self._n_layers)[0]

        def borders_with(border: int) -> tuple[int, ...]:
            return (*lower, border, *higher)

        return borders_with(
            downhill(lambda x: seconds(borders_with(x)), self._borders[number], self._stride, least, most)
        )

    def _placed(
        self, ranges: WholeRanges, part: Callable[[int, Window], Placement], borders: tuple[int, ...]
    ) -> Placement:
        """The part of each local device, up to its border, and whole layers after the last border."""
        windows = [(device, window) for device, window in enumerate(pairwise((0, *borders))) if window[0] < window[1]]
        placements = [part(device, window) for device, window in windows]
        if not windows or NO_PLACEMENT in placements:
            return NO_PLACEMENT
        pairs = zip(windows, placements, strict=True)
        return ranges.joined([DevicePart(*window, placement) for window, placement in pairs], borders[-1])

    def _part(self, memory: DeviceMemory, device: int, window: Window, quick: bool) -> Placement:
        """The fastest placement of a device's layers that uses the device, else NO_PLACEMENT. The first device's part
        includes the host's layers; norms and KV of other parts are all on their device."""
        request, part = replace(self._request, quick=quick), self._problems(device, window)
        n_layers = window[1] - window[0]
        n_layer = self._problem.graph.n_layer
        inputs = PolicyInputs(
            request, request.workload, costs_of(part, request.workload, request.phase),
            memory.of_layers(min(window[1], n_layer) - min(window[0], n_layer)),
            cache(lambda workload, **may: Slicer(part, workload, self._pricing(device), **may)),
            allows_slices_only=window[0] == 0, is_later_device=window[0] > 0,
        )  # fmt: skip
        candidates = [
            placement for placement in most_choices(part, inputs)
            if placement.is_sliced or placement.first_device_layer < n_layers
        ]  # fmt: skip
        return min(candidates, key=lambda placement: placement.seconds, default=NO_PLACEMENT)


ranges = Policy(NAME, "a range of layers for each of several devices", best_over)
