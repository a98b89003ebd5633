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
        begin, end = graph.layer_operators[layer]
        own = tuple((o.role, o.mul_mat, o.bytes) for o in operators[begin:end])
        alike[own, graph.layers[layer], layer >= placed.first_device_layer].append(layer)
    on_device = list(placed.on_device)
    for layers in alike.values():
        spans = [slice(*graph.layer_operators[layer]) for layer in layers]
        for span, own_sides in zip(spans, evenly([tuple(on_device[span]) for span in spans]), strict=True):
            on_device[span] = own_sides
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
