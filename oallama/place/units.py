"""What is ranked together. OATO ranks single operators; but an operator alone between two others of the other side
costs an excursion that its whole block would not (gate, up and down are worth moving together, DESIGN 3), and a search
that moves one operator at a time cannot see that. So the same iteration also runs over coarser units, and the best
prediction wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from oallama.core.types import Operator
from oallama.place.affinity import Unit

Granularity = Literal["operator", "block", "layer"]
GRANULARITIES: tuple[Granularity, ...] = ("operator", "block", "layer")


def units(operators: Sequence[Operator], granularity: Granularity) -> tuple[Unit, ...]:
    """Every operator once, grouped: by itself; by block (attention or FFN of a layer); by layer. Operators outside
    layers stay alone. Units keep graph order."""
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
