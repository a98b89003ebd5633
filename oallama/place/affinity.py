"""GPU affinity and the smart operator scheduling algorithm (OATO, section 3.3 and Algorithm 1).

B_i = (T_ci - T_gi - T'_i) / M_i seconds saved per byte of device memory; G_i is B_i min-max normalised to 0..1.
The published loop repeats rank -> T' -> rank until the affinities are stable and then fills (lines 6-15, 16-31). It
leaves open what T' is; ours is the marginal cost of the edges: what the crossings cost with operator i on the device
less what they cost with it on the CPU, everything else being where the last fill put it. T' is negative where i joins
its neighbours there.

That T' needs a placement is an interpretation. Lines 6-15 have none yet, as only lines 16-31 make one, and a T' of the
operator alone would leave nothing to repeat; but the loop is said to follow whether operators pass data between CPU and
device. So the ranking of every round is filled by lines 16-31 at once, and T' is taken from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.core.types import Operator
from oallama.cost.graph import first_within
from oallama.cost.placement import Costs, placement_seconds, transfer_seconds
from oallama.place.placed import Placed

MAX_KNOWN = 200_000  # of some hundred bytes each

Unit = tuple[int, ...]
"""Operator indices that are ranked and placed together."""

FillRule = Literal["continue", "full", "paper"]
"""continue: pass over what does not fit, leave on the CPU what gains nothing on the device (the default). full: pass
over what does not fit, and use the device up whether that gains or not. paper: stop at the first that does not fit,
gain or not."""

Granularity = Literal["operator", "block", "layer"]
GRANULARITIES: tuple[Granularity, ...] = ("operator", "block", "layer")


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


def fill(order: Sequence[int], sizes: Sequence[int], budget: int, rule: FillRule = "continue") -> frozenset[int]:
    """The items of `order` that go to the device.

    order: item indices, best first; sizes: bytes of every item; budget: bytes that may be used.
    "paper" stops at the first item that does not fit (Algorithm 1, lines 20-21); the others pass over it and try the
    rest.
    """
    placed = []
    used = 0
    for item in order:
        if used + sizes[item] > budget:
            if rule == "paper":
                break
            continue
        used += sizes[item]
        placed.append(item)
    return frozenset(placed)


def normalise(benefits: Sequence[float]) -> tuple[float, ...]:
    """Min-max normalisation to 0..1; all equal (or one alone) gives 1.0 each, as none is worse than another."""
    if not benefits:
        return ()
    low, high = min(benefits), max(benefits)
    if high <= low:
        return tuple(1.0 for _ in benefits)
    return tuple((b - low) / (high - low) for b in benefits)


def rank(benefits: Sequence[float]) -> tuple[int, ...]:
    """Indices by falling benefit; equal benefits keep their (graph) order, so ranks are deterministic."""
    return tuple(sorted(range(len(benefits)), key=[-b for b in benefits].__getitem__))


class Transfers:
    """T' of units, in seconds over the passes of `costs`. A search asks for the same few again and again.

    paper: as Algorithm 1 reads literally, the load of the operator's tensors across devices, charged to a candidate
    whose neighbours are on the other side: never negative.
    """

    def __init__(self, costs: Costs, paper: bool = False) -> None:
        self._costs, self._paper = costs, paper
        self._windows: dict[tuple[Unit, ...], Sequence[_Window]] = {}
        self._alike: dict[object, int] = {}
        self._known: dict[tuple[int, int, bytes], list[float]] = {}

    def of_all(self, on_device: Sequence[bool], first_device_layer: int, windows: Sequence[_Window]) -> list[float]:
        """Of each of the units in these windows, in graph order. Where layers and their neighbours are in the same
        state, so are these."""
        sides = bytes(on_device)
        found: list[float] = []
        for one in windows:
            key = (one.alike, first_within(first_device_layer, one.layers), sides[one.first : one.last])
            if key not in self._known:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = [self.of(on_device, first_device_layer, unit) for unit in one.units]
            found += self._known[key]
        return found

    def of(self, on_device: Sequence[bool], first_device_layer: int, unit: Unit) -> float:
        """Crossings with the whole unit on the device less those with it on the CPU."""
        window, sides, seconds = self._around(unit), list(on_device), []
        for side in (True, False):
            for i in unit:
                sides[i] = side
            seconds.append(transfer_seconds(self._costs, sides, first_device_layer, window))
        added_s = seconds[0] - seconds[1]
        return max(0.0, added_s) if self._paper else added_s

    def windows(self, units: tuple[Unit, ...]) -> Sequence[_Window]:
        """Of these units, which are in graph order."""
        if units not in self._windows:
            groups: dict[tuple[int, int], list[Unit]] = {}
            for unit in units:
                groups.setdefault(self._around(unit), []).append(unit)
            self._windows[units] = [self._window(*item) for item in groups.items()]
        return self._windows[units]

    def _around(self, unit: Unit) -> tuple[int, int]:
        """The layers that moving it reaches."""
        graph = self._costs.graph
        own = [graph.operator_layer[i] for i in unit]
        return graph.around(min(own), max(own) + 1)

    def _window(self, layers: tuple[int, int], units: Sequence[Unit]) -> _Window:
        costs, graph = self._costs, self._costs.graph
        first, last = graph.operators_of(layers)
        members = tuple(tuple(i - first for i in unit) for unit in units)
        kind = (graph.layers[slice(*layers)], costs.offloaded[first:last], members)
        alike = self._alike.setdefault(kind, len(self._alike))
        return _Window(layers, first, last, units, [_saved(costs, unit) for unit in units], alike)


@dataclass(frozen=True, slots=True)
class _Window:
    """Layers that the same units reach where they move."""

    layers: tuple[int, int]  # [first, last)
    first: int  # operator of these layers
    last: int  # behind the last of them
    units: Sequence[Unit]
    saved: Sequence[tuple[float, int]]  # T_c - T_g and M of each unit
    alike: int  # the same for windows in which the same moves cost the same


def benefit(costs: Costs, unit: Unit, transfer_s: float) -> float:
    """B = (T_c - T_g - T') / M of a unit, seconds per byte; minus infinity where the device cannot compute it."""
    saved_s, n_bytes = _saved(costs, unit)
    return (saved_s - transfer_s) / n_bytes


def _saved(costs: Costs, unit: Unit) -> tuple[float, int]:
    """(T_c - T_g, M) of a unit."""
    own = [costs.operators[i] for i in unit]
    saved_s = sum(float("-inf") if cost.t_gpu_s is None else cost.t_cpu_s - cost.t_gpu_s for cost in own)
    return saved_s, max(1, sum(cost.bytes for cost in own))


def iterate(
    costs: Costs,
    units: tuple[Unit, ...],
    budget: int,
    first_device_layer: int,
    *,
    transfers: Transfers | None = None,
    rule: FillRule = "continue",
    start: Sequence[bool] | None = None,
    max_iterations: int = 50,
    published: bool = False,
) -> Placed:
    """Algorithm 1 over units: rank by B without T', fill, then rank with T' of that placement, fill, until the
    affinities are stable. A placement met before is a cycle, in which Algorithm 1 would run for ever: it ends the loop
    unconverged. The placement with the least predicted time of all that were met is returned.

    budget: bytes for the weights of operators. rule: see fill.FillRule. start: a placement to compute the first T'
    from, in place of the one filled without T'. published: as Algorithm 1 has it, the placement of the stable
    affinities is returned, whatever is predicted of it; of a cycle, the one in it with the least predicted time.
    """
    transfers = transfers or Transfers(costs)
    n = len(costs.operators)
    windows = transfers.windows(units)
    saved = [one for window in windows for one in window.saved]
    sizes = [n_bytes for _, n_bytes in saved]

    def place(benefits: Sequence[float]) -> tuple[bool, ...]:
        least = 0.0 if rule == "continue" else float("-inf")
        useful = [u for u in rank(benefits) if benefits[u] > least]
        chosen = fill(useful, sizes, budget, rule)
        on_device = [False] * n
        for u in chosen:
            for i in units[u]:
                on_device[i] = True
        return tuple(on_device)

    placement = tuple(start) if start is not None else place([saved_s / n_bytes for saved_s, n_bytes in saved])
    met = {placement: placement_seconds(costs, placement, first_device_layer)}

    def ended(last: tuple[bool, ...], iteration: int, converged: bool) -> Placed:
        """last: the placement that the loop came to, or came back to."""
        found = list(met)
        looped = found[found.index(last) :] if published else found
        kept = min(looped, key=lambda one: met[one])
        return Placed(kept, first_device_layer, met[kept], iteration, converged)

    for iteration in range(1, max_iterations + 1):
        moved = transfers.of_all(placement, first_device_layer, windows)
        following = place([(own_s - t_s) / n_bytes for (own_s, n_bytes), t_s in zip(saved, moved, strict=True)])
        if following in met:  # the one before again: same neighbours, same T', so the affinities are stable
            return ended(following, iteration, following == placement)
        met[following] = placement_seconds(costs, following, first_device_layer)
        placement = following
    return ended(placement, max_iterations, False)
