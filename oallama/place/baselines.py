"""Placements to compare with: whole layers as llama.cpp's -ngl does, and everything on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from oallama.cost.predict import Costs, placement_seconds
from oallama.place.oato import Placed


def layers(costs: Costs, budget: Callable[[int], int]) -> Placed:
    """The most whole layers that fit, from the end, KV with them: `-ngl k` for the largest k (llama.cpp counts the
    output layer as one of the k, and takes it first).

    budget(first_device_layer): bytes left for operators on the device.
    """
    n_layer = costs.graph.n_layer
    layer_of = costs.graph.operator_layer
    best = n_layer + 1
    for first in range(n_layer, -1, -1):
        size = sum(cost.bytes for cost, layer in zip(costs.operators, layer_of, strict=True) if layer >= first)
        if size > budget(first):
            break
        best = first
    on_device = tuple(
        layer >= best and cost.t_gpu_s is not None for cost, layer in zip(costs.operators, layer_of, strict=True)
    )
    return Placed(on_device, best, 1, True, placement_seconds(costs, on_device, best))


def cpu(costs: Costs) -> Placed:
    """Everything on the CPU, KV too."""
    nothing = (False,) * len(costs.operators)
    first = costs.graph.n_layer + 1
    return Placed(nothing, first, 1, True, placement_seconds(costs, nothing, first))
