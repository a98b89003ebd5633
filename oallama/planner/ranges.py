"""Ranges of layers for several devices: a dynamic program over layers and devices, by seconds and memory. Pure.

llama.cpp computes layer after layer; the first layers stay on the host, the others are divided among the devices in
their order. So a placement is one range of layers per device, and the seconds of a pass are the sum over ranges, plus a
copy from each device to the next. The least sum is found backwards from the last layer: the seconds of the layers from
some layer on depend only on that layer and on the device before it.

Within a range a layer's weights go to the device in two steps: all but the FFN, then the FFN. Steps are taken by
falling seconds saved per byte until the device is full; the host keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from oallama.core.types import Operator
from oallama.cost.ranges import DeviceCosts, entry_seconds, ranges_seconds
from oallama.cost.whole import placement_seconds
from oallama.planner.placement import DeviceSlices, Placement, whole_assignments

HOST = -1
"""Stands for the device before a layer if that layer is on the host."""


class Ranges:
    """The dynamic program. seconds: (device, begin, end) -> seconds of that range, infinite if it does not fit. entry:
    (device before, device, first layer) -> seconds of the copy between them."""

    def __init__(
        self,
        n_layers: int,
        n_devices: int,
        seconds: Callable[[int, int, int], float],
        entry: Callable[[int, int, int], float],
    ) -> None:
        self._n_layers, self._n_devices, seconds = n_layers, n_devices, cache(seconds)
        # (layer, device before) -> (seconds from that layer on, its device, where the range ends)
        self._least: dict[tuple[int, int], tuple[float, int, int]] = {}
        for begin in reversed(range(n_layers + 1)):
            for previous in range(HOST, n_devices if begin else 0):
                if begin == n_layers:
                    self._least[begin, previous] = (0.0, HOST, begin)
                    continue
                self._least[begin, previous] = min(
                    (
                        (
                            (0.0 if previous == HOST else entry(previous, device, begin))
                            + seconds(device, begin, end)
                            + self._least[end, device][0],
                            device,
                            end,
                        )
                        for device in range(previous + 1, n_devices)
                        for end in range(n_layers, begin, -1)
                    ),
                    key=lambda choice: choice[0],
                    default=(inf, HOST, n_layers),
                )

    def best(self, host_seconds: Callable[[int], float]) -> tuple[float, int, tuple[int, ...]]:
        """(seconds, first layer on a device, layers of each device) with the least seconds; of equal ones the one with
        the fewest layers on devices. host_seconds: first layer on a device -> seconds of the host's layers."""
        totals = [host_seconds(first) + self._least[first, HOST][0] for first in range(self._n_layers + 1)]
        total = min(totals)
        first = self._n_layers - totals[::-1].index(total)
        return total, first, self.layers_from(HOST, first)[1]

    def layers_from(self, previous: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """(least seconds, layers of each device) of the layers from `begin` on, if device `previous` has the layer
        before them."""
        layers, least_s = [0] * self._n_devices, self._least[begin, previous][0]
        while begin < self._n_layers:
            _, previous, end = self._least[begin, previous]
            layers[previous], begin = end - begin, end
        return least_s, tuple(layers)


class DevicePart(NamedTuple):
    """Layers [begin, end) on a device, with their placement (planner/parts.py)."""

    device: int
    window: tuple[int, int]
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that adds some of a layer's weights to its device: seconds saved per byte, added seconds (negative) and
    bytes, and the operators. The steps of a layer are taken in order."""

    worth: float
    seconds: float
    bytes: int
    operators: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer inside a device's range: its seconds without weights on the device, and its steps. n_bytes: of all
    steps."""

    seconds: float
    steps: tuple[_Step, ...]

    @property
    def n_bytes(self) -> int:
        return sum(step.bytes for step in self.steps)


class WholeRanges:
    """Whole operators on several devices, over the passes of `devices`. budgets: for each device, number of layers ->
    bytes for weights beside their norms and KV; negative: these do not fit."""

    def __init__(
        self, devices: Sequence[DeviceCosts], operators: Sequence[Operator], budgets: Sequence[Callable[[int], int]]
    ) -> None:
        graph = devices[0].costs.graph
        self._devices, self._budgets, self._n_layer = devices, budgets, graph.n_layer
        self._n_operators = len(operators)
        self._layers = [_layers(device, operators) for device in devices]

        def entry(previous: int, device: int, layer: int) -> float:
            return entry_seconds(devices[device], previous, layer)

        self._ranges = Ranges(graph.n_layer + 1, len(devices), self._seconds, entry)

    def best(self) -> Placement:
        """The placement with the least seconds."""
        costs, on_host = self._devices[0].costs, (False,) * self._n_operators
        host_s = [
            placement_seconds(costs, on_host, first, window=(0, first)) for first in range(len(self._layers[0]) + 1)
        ]
        _, first, device_layers = self._ranges.best(host_s.__getitem__)
        on_device = self._on_device(first, device_layers)
        total = ranges_seconds(self._devices, device_layers, on_device, first, {})
        return Placement(whole_assignments(on_device), first, total, 1, device_layers=device_layers)

    def joined(self, parts: Sequence[DevicePart], border: int) -> Placement:
        """The parts of the first devices, up to `border`, joined with the best ranges of the remaining layers on the
        other devices; infinite seconds if these do not fit."""
        seconds, later_layers = self._ranges.layers_from(parts[-1].device, border)
        counts, n_devices = list(later_layers), len(self._devices)
        slices = [DeviceSlices() for _ in range(n_devices)]
        for part, previous_part in zip(parts, (None, *parts), strict=False):
            seconds += part.placement.seconds
            if previous_part is not None:
                seconds += entry_seconds(self._devices[part.device], previous_part.device, part.window[0])
            counts[part.device] = part.window[1] - part.window[0] - part.placement.first_device_layer
            slices[part.device] = part.placement.first_slices
        part_assignments = tuple(assignment for part in parts for assignment in part.placement.assignments)
        on_device = self._on_device(border, later_layers)
        return Placement(
            (*part_assignments, *whole_assignments(on_device[len(part_assignments) :])),
            parts[0].placement.first_device_layer,
            seconds,
            slices=tuple(slices),
            device_layers=tuple(counts),
            notes=tuple(dict.fromkeys(note for part in parts for note in part.placement.notes)),
        )

    def _budget(self, device: int, begin: int, end: int) -> int:
        return self._budgets[device](min(end, self._n_layer) - begin)

    def _seconds(self, device: int, begin: int, end: int) -> float:
        budget = self._budget(device, begin, end)
        if budget < 0:
            return inf
        members = self._layers[device][begin:end]
        if self._devices[device].is_remote and sum(layer.n_bytes for layer in members) > budget:
            return inf
        return sum(layer.seconds for layer in members) + sum(step.seconds for step in _steps_within(members, budget))

    def _on_device(self, first: int, device_layers: Sequence[int]) -> list[bool]:
        """Which operators are on their layer's device."""
        on_device = [False] * self._n_operators
        for device, (begin, n) in enumerate(zip(accumulate(device_layers, initial=first), device_layers, strict=False)):
            if n and (budget := self._budget(device, begin, begin + n)) >= 0:
                for step in _steps_within(self._layers[device][begin : begin + n], budget):
                    for i in step.operators:
                        on_device[i] = True
        return on_device


def _layers(device: DeviceCosts, operators: Sequence[Operator]) -> list[_Layer]:
    """Each layer in the middle of the device's range. The steps: all but the FFN, then the FFN; or both at once, where
    the second saves more for each byte."""
    costs, layers = device.costs, list[_Layer]()
    sides = [False] * len(operators)  # of one layer at a time

    def seconds(layer: int, indices: Sequence[int]) -> float:
        for i in indices:
            sides[i] = True
        total = placement_seconds(costs, sides, layer, window=(layer, layer + 1))
        for i in indices:
            sides[i] = False
        return total

    def step(layer: int, old: Sequence[int], new: Sequence[int]) -> _Step:
        added = tuple(i for i in new if i not in old)
        n_bytes, saved_s = sum(costs.operators[i].bytes for i in added), seconds(layer, old) - seconds(layer, new)
        return _Step(saved_s / max(1, n_bytes), -saved_s, n_bytes, added)

    for layer, (begin, end) in enumerate(costs.graph.layer_operators):
        computable = [i for i in range(begin, end) if costs.operators[i].t_gpu_s is not None]
        non_ffn = [i for i in computable if not operators[i].role.startswith("ffn_")]
        steps = [step(layer, (), non_ffn), step(layer, non_ffn, computable)]
        if steps[0].worth < steps[1].worth or device.is_remote:
            steps = [step(layer, (), computable)]
        useful = tuple(step for step in steps if step.worth > 0 or device.is_remote)
        layers.append(_Layer(seconds(layer, ()), useful))
    return layers


def _steps_within(layers: Sequence[_Layer], budget: int) -> list[_Step]:
    """Steps that fit the budget, the most seconds saved per byte first; a layer's second step only after its first."""
    order = sorted(
        ((step, index, number) for index, layer in enumerate(layers) for number, step in enumerate(layer.steps)),
        key=lambda ranked: -ranked[0].worth,
    )
    chosen, n_of, remaining = [], [0] * len(layers), budget
    for step, index, number in order:
        if step.bytes <= remaining and n_of[index] == number:
            chosen.append(step)
            n_of[index] += 1
            remaining -= step.bytes
    return chosen
