"""Ranges of layers for several devices: a dynamic program over layers and devices, by seconds and memory. Pure.

llama.cpp computes layer after layer, and gives the last ones to its devices in their order; the first stay on the host.
So a placement is one range for each device, and a pass takes the sum of what each range takes, and of a copy where one
device follows another. The least sum is found from the last layer backwards: the seconds of the layers from one on
depend only on that layer and on the device before it.

Within a range a layer's weights go to the device in two steps: all but the FFN, then the FFN. The steps that save most
seconds for each byte are taken first, until the device is full; the host keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from oallama.core.types import Operator
from oallama.cost.ranges import DeviceCosts, entry_seconds, range_seconds, ranges_seconds
from oallama.planner.placement import Placement, whole_assignments


def best_ranges(
    n_layers: int,
    n_devices: int,
    host_seconds: Callable[[int], float],
    seconds: Callable[[int, int, int], float],
    entry: Callable[[int, int, int], float],
) -> tuple[float, int, tuple[int, ...]]:
    """(seconds, first layer on a device, layers of each device) with the least seconds; of equal ones with the fewest
    devices, and then layers on them.

    host_seconds: of the layers before this one on the host. seconds: of a device's range [begin, end), infinite where
    it does not fit. entry: of the copy from one device to another, which the layer is the first of.
    """
    none = -1
    least: dict[tuple[int, int], tuple[float, int, int]] = {}  # (layer, device before) -> (seconds, device, end)
    for begin in reversed(range(n_layers + 1)):
        for before in range(none, n_devices if begin else 0):
            if begin == n_layers:
                least[begin, before] = (0.0, none, begin)
                continue
            least[begin, before] = min(
                (
                    (
                        (0.0 if before == none else entry(before, device, begin))
                        + seconds(device, begin, end)
                        + least[end, device][0],
                        device,
                        end,
                    )
                    for device in range(before + 1, n_devices)
                    for end in range(n_layers, begin, -1)
                ),
                key=lambda found: found[0],
                default=(inf, none, n_layers),
            )
    totals = [host_seconds(first) + least[first, none][0] for first in range(n_layers + 1)]
    total = min(totals)
    begin = first = n_layers - totals[::-1].index(total)
    layers, before = [0] * n_devices, none
    while begin < n_layers:
        _, before, end = least[begin, before]
        layers[before], begin = end - begin, end
    return total, first, tuple(layers)


@dataclass(frozen=True, slots=True)
class _Step:
    """More of a layer's weights on its device: what that saves for each byte, its seconds (negative) and bytes, and the
    operators. The steps of a layer follow one another."""

    worth: float
    seconds: float
    bytes: int
    operators: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer in the middle of a device's range: its seconds with none of its weights there, and what it may have."""

    seconds: float
    steps: tuple[_Step, ...]


def place(
    devices: Sequence[DeviceCosts], operators: Sequence[Operator], budgets: Sequence[Callable[[int], int]]
) -> Placement:
    """The placement with the least seconds over the passes of `devices`. budgets: of each device, bytes for weights
    where so many blocks have their norms and KV there; negative: these do not fit."""
    graph = devices[0].costs.graph
    n_layers = graph.n_layer + 1
    layers = [[_layer(device, operators, layer) for layer in range(n_layers)] for device in devices]

    def budget(device: int, begin: int, end: int) -> int:
        return budgets[device](min(end, graph.n_layer) - begin)

    def seconds(device: int, begin: int, end: int) -> float:
        left = budget(device, begin, end)
        if left < 0:
            return inf
        members = layers[device][begin:end]
        return sum(layer.seconds for layer in members) + sum(step.seconds for step in _taken(members, left))

    on_host = (False,) * len(operators)
    host_s = [range_seconds(devices[0].costs, first, first, on_host, from_host=True) for first in range(n_layers + 1)]
    _, first, device_layers = best_ranges(
        n_layers,
        len(devices),
        host_s.__getitem__,
        seconds,
        lambda last, to, layer: entry_seconds(devices[to], last, layer),
    )
    there: set[int] = set()
    for device, (begin, n) in enumerate(zip(accumulate(device_layers, initial=first), device_layers, strict=False)):
        if n:
            taken = _taken(layers[device][begin : begin + n], budget(device, begin, begin + n))
            there.update(i for step in taken for i in step.operators)
    on_device = [i in there for i in range(len(operators))]
    total = ranges_seconds(devices, device_layers, on_device, first)
    return Placement(whole_assignments(on_device), first, total, 1, device_layers=device_layers)


def _layer(device: DeviceCosts, operators: Sequence[Operator], layer: int) -> _Layer:
    """The steps: all but the FFN, then the FFN; or both at once, where the second saves more for each byte."""
    costs = device.costs
    begin, end = costs.graph.layer_operators[layer]
    able = [i for i in range(begin, end) if costs.operators[i].t_gpu_s is not None]
    others = [i for i in able if not operators[i].role.startswith("ffn_")]

    def seconds(there: Sequence[int]) -> float:
        on_device = [i in there for i in range(len(operators))]
        return range_seconds(costs, layer, layer + 1, on_device, from_host=False)

    def step(before: Sequence[int], after: Sequence[int]) -> _Step:
        added = tuple(i for i in after if i not in before)
        n_bytes, saved_s = sum(costs.operators[i].bytes for i in added), seconds(before) - seconds(after)
        return _Step(saved_s / max(1, n_bytes), -saved_s, n_bytes, added)

    steps = [step((), others), step(others, able)]
    if steps[0].worth < steps[1].worth:
        steps = [step((), able)]
    return _Layer(seconds(()), tuple(step for step in steps if step.worth > 0))


def _taken(layers: Sequence[_Layer], budget: int) -> list[_Step]:
    """Steps within the budget, those first that save most seconds for each byte; none without the one before it."""
    order = sorted(
        ((step, at, number) for at, layer in enumerate(layers) for number, step in enumerate(layer.steps)),
        key=lambda found: -found[0].worth,
    )
    taken, n_of, left = [], [0] * len(layers), budget
    for step, at, number in order:
        if step.bytes <= left and n_of[at] == number:
            taken.append(step)
            n_of[at] += 1
            left -= step.bytes
    return taken
