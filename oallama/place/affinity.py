"""GPU affinity and the smart operator scheduling algorithm (OATO, section 3.3 and Algorithm 1, its lines named).

B_i = (T_ci - T_gi - T'_i) / M_i is what operator i saves in seconds for each byte of device memory; G_i is B_i scaled
to 0..1. Algorithm 1 ranks by B, computes T', ranks again until the affinities are stable (lines 1-15), and fills the
device in that order (lines 16-31).

It leaves open what T' is. Ours is the marginal cost of the edges (`Transfers`): what crossings cost with i on the
device less what they cost with it on the CPU, everything else being where the last ranking puts it. T' is negative
where i joins its neighbours there. That T' needs a placement is an interpretation: lines 6-15 have none yet, and a T'
of the operator alone would leave nothing to repeat, but the loop is said to follow whether operators pass data between
CPU and device. So each ranking is filled by lines 16-31 at once, and the next T' is taken from that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from oallama.core.types import Operator
from oallama.cost.graph import first_within
from oallama.cost.whole import Costs, placement_seconds, transfer_seconds
from oallama.place.placement import Placed

Unit = tuple[int, ...]
"""Operator indices that are ranked and placed together."""


class Transfers:
    """T' of units, in seconds over the passes of `costs`."""

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


AffinityRule = Literal["default", "paper"]
"""paper: T' is never negative, and the placement that Algorithm 1 converged to is kept (oato.search)."""

FillRule = Literal["continue", "full", "paper"]
"""continue: pass over what does not fit, leave on the CPU what gains nothing on the device (the default). full: pass
over what does not fit, and use the device up whether that gains or not. paper: stop at the first that does not fit,
gain or not."""

Granularity = Literal["operator", "block", "layer"]
GRANULARITIES: tuple[Granularity, ...] = ("operator", "block", "layer")

MOST_ROUNDS = 50
"""Most rounds of lines 6-15 without a cycle. Of 354 searches of the corpus three come so far; eight rounds give the
same plans."""


def affinity(t_cpu_s: float, t_gpu_s: float | None, t_transfer_s: float, n_bytes: int) -> float:
    """B, lines 3 and 9: seconds saved for each byte. Minus infinity where the device cannot compute it (T_g None)."""
    return -inf if t_gpu_s is None else (t_cpu_s - t_gpu_s - t_transfer_s) / max(1, n_bytes)


def normalise(benefits: Sequence[float]) -> tuple[float, ...]:
    """G, lines 5 and 11: B from 0 to 1; all equal (or one alone) gives 1.0 each, as none is worse than another."""
    low, high = min(benefits, default=0.0), max(benefits, default=0.0)
    return tuple((b - low) / (high - low) if high > low else 1.0 for b in benefits)


def rank(benefits: Sequence[float]) -> tuple[int, ...]:
    """Lines 5 and 11: indices by falling B; equals keep their (graph) order, so ranks are deterministic."""
    return tuple(sorted(range(len(benefits)), key=[-b for b in benefits].__getitem__))


def fill(order: Sequence[int], sizes: Sequence[int], budget: int, rule: FillRule = "continue") -> frozenset[int]:
    """Lines 17-24: the items of `order` that go to the device, within `budget` bytes.

    order: item indices, best first; sizes: bytes of every item.
    """
    placed, used = [], 0
    for item in order:
        if used + sizes[item] <= budget:
            used += sizes[item]
            placed.append(item)
        elif rule == "paper":  # line 21
            break
    return frozenset(placed)


def algorithm_1(
    costs: Costs,
    units: tuple[Unit, ...],
    budget: int,
    first_device_layer: int,
    *,
    transfers: Transfers | None = None,
    rule: FillRule = "continue",
    start: Sequence[bool] | None = None,
    published: bool = False,
) -> Placed:
    """Algorithm 1 over units, which are ranked and placed together. A placement met before is a cycle, in which the
    loop would run for ever: it ends it unconverged. The placement with the least predicted time of all that were met is
    returned.

    budget: bytes for the weights of operators (line 16: of 0.90 of the memory). start: a placement to compute the first
    T' from, in place of lines 2-5. published: return the placement of the stable affinities, whatever is predicted of
    it; of a cycle the fastest in it.
    """
    transfers = transfers or Transfers(costs)
    times = [transfers.times(unit) for unit in units]
    t_cpu, t_gpu = [time[0] for time in times], [time[1] for time in times]
    sizes = [time[2] for time in times]
    nothing = [0.0] * len(units)

    def ranked_and_filled(t_transfer: Sequence[float]) -> tuple[bool, ...]:
        benefits = list(map(affinity, t_cpu, t_gpu, t_transfer, sizes))
        useful = [u for u in rank(benefits) if rule != "continue" or benefits[u] > 0]
        there = {i for u in fill(useful, sizes, budget, rule) for i in units[u]}
        return tuple(map(there.__contains__, range(len(costs.operators))))  # lines 25-30

    def ended(last: tuple[bool, ...], iteration: int, converged: bool) -> Placed:
        """last: the placement that the loop came to, or came back to."""
        found = list(met)
        kept = min(found[found.index(last) :] if published else found, key=lambda one: met[one])
        return Placed(kept, first_device_layer, met[kept], iteration, converged)

    placement = tuple(start) if start is not None else ranked_and_filled(nothing)  # lines 2-5
    met = {placement: placement_seconds(costs, placement, first_device_layer)}
    for iteration in range(1, MOST_ROUNDS + 1):  # line 6
        following = ranked_and_filled(transfers.of_all(units, placement, first_device_layer))  # lines 8-11
        if following in met:  # the one before again: same neighbours, same T', so the affinities are stable (line 12)
            return ended(following, iteration, following == placement)
        met[following] = placement_seconds(costs, following, first_device_layer)
        placement = following
    return ended(placement, MOST_ROUNDS, False)


def units(operators: Sequence[Operator], granularity: Granularity) -> tuple[Unit, ...]:
    """Every operator once, grouped: by itself; by block (attention or FFN of a layer); by layer. Operators outside
    layers stay alone. Units keep graph order.

    OATO ranks single operators. But one alone between two of the other side costs an excursion that its whole block
    would not, and a search that moves one at a time cannot see that: so it also runs over coarser units.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, operator in enumerate(operators):
        key: tuple[object, ...]
        if operator.layer is None or granularity == "operator":
            key = ("operator", index)
        elif granularity == "layer":
            key = ("layer", operator.layer)
        else:
            key = ("block", operator.layer, "ffn" if operator.role.startswith("ffn_") else "attention")
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values())
