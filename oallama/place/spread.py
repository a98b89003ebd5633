"""Placements of layers that are alike, spread evenly over the model: the link works at its best where as much lies
between one streamed block and the next everywhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

from oallama.core.types import Operator
from oallama.cost.graph import Graph
from oallama.place.placed import Placed

_T = TypeVar("_T", bound=Hashable)


def spread(operators: Sequence[Operator], graph: Graph, placed: Placed) -> Placed:
    """The same with the sides of layers exchanged among those that are alike, and whose norms and KV are on the same
    side; as many bytes of each are on the device as before. Without slices."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for layer in range(graph.n_layer):
        own = tuple((operators[i].role, operators[i].mul_mat, operators[i].bytes) for i in _operators(graph, layer))
        alike[own, graph.layers[layer], layer >= placed.first_device_layer].append(layer)
    on_device = list(placed.on_device)
    for layers in alike.values():
        sides = [tuple(on_device[i] for i in _operators(graph, layer)) for layer in layers]
        for layer, own_sides in zip(layers, evenly(sides), strict=True):
            for i, there in zip(_operators(graph, layer), own_sides, strict=True):
                on_device[i] = there
    return replace(placed, on_device=tuple(on_device), slices=None)


def evenly(items: Sequence[_T]) -> list[_T]:
    """The same items, equal ones as far apart as their number allows."""
    counts = Counter(items)
    due = {item: count / 2 for item, count in counts.items()}
    found = []
    for _ in items:
        chosen = max(counts, key=lambda item: due[item])
        found.append(chosen)
        due[chosen] -= len(items)
        for item, count in counts.items():
            due[item] += count
    return found


def _operators(graph: Graph, layer: int) -> range:
    return range(*graph.operators_of((layer, layer + 1)))
