"""T', the time that an operator's crossings between CPU and device take (OATO, section 3.2 and Algorithm 1, line 8).

Ours is the marginal cost of the edges: what crossings cost with the operator on the device less what they cost with it
on the CPU, everything else being where the last ranking puts it. It is negative where the operator joins its neighbours
there. That T' needs a placement is an interpretation: a T' of the operator alone would leave Algorithm 1 nothing to
repeat, but its loop is said to follow whether operators pass data between CPU and device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from oallama.cost.graph import first_within
from oallama.cost.whole import Costs, transfer_seconds

Unit = tuple[int, ...]
"""Operator indices that are ranked and placed together."""


class Transfers:
    """T' of units, in seconds over the passes of `costs`. What is alike is computed once: most layers are."""

    def __init__(self, costs: Costs, paper: bool = False) -> None:
        """paper: as Algorithm 1 reads literally, the load of the operator's tensors across devices, charged to a
        candidate whose neighbours are on the other side: never negative."""
        self._costs, self._paper = costs, paper
        self._windows: dict[tuple[Unit, ...], list[_Window]] = {}
        self._times: dict[Unit, tuple[float, float | None, int]] = {}
        self._kinds: dict[Hashable, int] = {}
        self._known: dict[Hashable, list[float]] = {}

    def times(self, unit: Unit) -> tuple[float, float | None, int]:
        """(T_c, T_g, M) of a unit."""
        if unit not in self._times:
            self._times[unit] = self._sums(unit)
        return self._times[unit]

    def _sums(self, unit: Unit) -> tuple[float, float | None, int]:
        own = [self._costs.operators[i] for i in unit]
        on_device = [cost.t_gpu_s for cost in own if cost.t_gpu_s is not None]
        t_gpu_s = sum(on_device) if len(on_device) == len(own) else None
        return sum(cost.t_cpu_s for cost in own), t_gpu_s, sum(cost.bytes for cost in own)

    def of(self, on_device: Sequence[bool], first_device_layer: int, unit: Unit) -> float:
        """Crossings with the whole unit on the device less those with it on the CPU."""
        window, sides, seconds = self._around(unit), list(on_device), []
        for side in (True, False):
            for i in unit:
                sides[i] = side
            seconds.append(transfer_seconds(self._costs, sides, first_device_layer, window))
        added_s = seconds[0] - seconds[1]
        return max(0.0, added_s) if self._paper else added_s

    def of_all(self, units: tuple[Unit, ...], on_device: Sequence[bool], first_device_layer: int) -> list[float]:
        """T' of each unit. units: in graph order."""
        if units not in self._windows:
            self._windows[units] = self._windows_of(units)
        sides = bytes(on_device)
        found: list[float] = []
        for one in self._windows[units]:
            key = (one.kind, first_within(first_device_layer, one.layers), sides[one.first : one.last])
            if key not in self._known:
                self._known[key] = [self.of(on_device, first_device_layer, unit) for unit in one.units]
            found += self._known[key]
        return found

    def _windows_of(self, units: tuple[Unit, ...]) -> list[_Window]:
        graph, offloaded = self._costs.graph, self._costs.offloaded
        groups: dict[tuple[int, int], list[Unit]] = {}
        for unit in units:
            groups.setdefault(self._around(unit), []).append(unit)
        found = []
        for layers, own in groups.items():
            first, last = graph.operators_of(layers)
            members = tuple(tuple(i - first for i in unit) for unit in own)
            kind = (graph.layers[slice(*layers)], offloaded[first:last], members)
            found.append(_Window(layers, first, last, own, self._kinds.setdefault(kind, len(self._kinds))))
        return found

    def _around(self, unit: Unit) -> tuple[int, int]:
        """Layers whose crossings change where the unit moves."""
        graph = self._costs.graph
        own = [graph.operator_layer[i] for i in unit]
        return graph.around(min(own), max(own) + 1)


@dataclass(frozen=True, slots=True)
class _Window:
    """Layers that the same units reach where they move."""

    layers: tuple[int, int]  # [first, last)
    first: int  # operator of these layers
    last: int  # behind the last of them
    units: Sequence[Unit]
    kind: int  # the same for windows in which the same moves cost the same
