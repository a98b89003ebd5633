"""Predicted seconds of a placement of whole operators: ggml runs the splits of a graph one after another,
so a forward pass takes the sum of its operators where they are, of what is no operator in each layer, and of the
crossings. Sliced blocks are priced in cost/slices.py. For the crossings they are where their inputs and outputs are: in
host memory, or on the device with their neighbours (cost/blocks.py, `residents`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf
from operator import getitem, or_

from oallama.cost.graph import Graph, crossings
from oallama.cost.operators import OFFLOAD_MIN_TOKENS, OperatorCost
from oallama.cost.passes import Pass
from oallama.cost.transfer import TransferRates


@dataclass(frozen=True, slots=True)
class Costs:
    """What a search needs to price a placement over a fixed list of forward passes."""

    operators: tuple[OperatorCost, ...]
    graph: Graph
    rates: TransferRates
    passes: tuple[Pass, ...]
    rest_cpu_s: float  # of one layer on the host over `passes`, without weight-bearing mul-mats
    rest_device_s: float
    offloaded: tuple[bool, ...] = ()  # for each operator, whether llama.cpp computes it on the device in large batches
    # though the host has it; (): none
    sides_s: tuple[tuple[float, float], ...] = field(init=False, compare=False, repr=False)  # (T_c, T_g or infinite)
    large: tuple[Pass, ...] = field(init=False, compare=False, repr=False)  # passes, for which it does
    small: tuple[Pass, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sides = ((cost.t_cpu_s, inf if cost.t_gpu_s is None else cost.t_gpu_s) for cost in self.operators)
        object.__setattr__(self, "sides_s", tuple(sides))
        large = tuple(p for p in self.passes if p.n_tokens >= OFFLOAD_MIN_TOKENS)
        object.__setattr__(self, "large", large)
        object.__setattr__(self, "small", tuple(p for p in self.passes if p not in large))

    def rest_seconds(self, first_device_layer: int) -> float:
        """Of what is no operator in the layers that run, those from first_device_layer on being on the device."""
        n_device_layers = max(0, self.graph.n_run - first_device_layer)
        return n_device_layers * self.rest_device_s + (self.graph.n_run - n_device_layers) * self.rest_cpu_s

    @property
    def layouts(self) -> tuple[str, ...]:
        """In which the host holds each operator."""
        return tuple(cost.layout for cost in self.operators)


def placement_seconds(
    costs: Costs, on_device: Sequence[bool], first_device_layer: int, sliced: Collection[int] = ()
) -> float:
    """Predicted seconds of all passes together under a placement.

    on_device: one entry per operator, in the order of costs.operators. first_device_layer as in graph.node_sides.
    sliced: operators that take no time here, as their blocks are priced elsewhere.
    """
    seconds: Iterable[float] = map(getitem, costs.sides_s, on_device)
    if sliced:
        seconds = compress(seconds, [i not in sliced for i in range(len(on_device))])
    total = sum(seconds)
    if total == inf:
        return inf
    total += costs.rest_seconds(first_device_layer)
    return total + transfer_seconds(costs, on_device, first_device_layer, sliced=sliced)


def transfer_seconds(
    costs: Costs,
    on_device: Sequence[bool],
    first_device_layer: int,
    window: tuple[int, int] | None = None,
    sliced: Collection[int] = (),
) -> float:
    """Of crossings over all passes, between the layers of the window (None: all). What is offloaded in a large batch
    is on the device there, and takes norms and attention along; slices are the split backend's, which nobody
    offloads."""
    offloaded: Sequence[bool] = costs.offloaded if costs.large else ()
    if sliced:
        offloaded = [off and i not in sliced for i, off in enumerate(offloaded)]
    if not any(offloaded):
        return costs.rates.over(crossings(costs.graph, on_device, first_device_layer, window), costs.passes)
    first, last = (0, len(offloaded)) if window is None else costs.graph.operators_of(window)
    there = list(on_device)
    there[first:last] = map(or_, on_device[first:last], offloaded[first:last])
    seconds = costs.rates.over(crossings(costs.graph, there, 0, window), costs.large)
    if costs.small:
        seconds += costs.rates.over(crossings(costs.graph, on_device, first_device_layer, window), costs.small)
    return seconds


def cpu_seconds(costs: Costs, on_device: Sequence[bool], first_device_layer: int, sliced: Collection[int]) -> float:
    """Of placement_seconds, in which the CPU works."""
    n_layers = min(costs.graph.n_run, first_device_layer)
    own = (
        cost.t_cpu_s
        for i, (cost, there) in enumerate(zip(costs.operators, on_device, strict=True))
        if not there and i not in sliced
    )
    return sum(own) + n_layers * costs.rest_cpu_s
