"""A placement, and placements to compare with: whole layers as llama.cpp's -ngl does, and everything on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oallama.core.types import StreamSettings
from oallama.cost.predict import Costs, placement_seconds

Budget = Callable[[int], int]
"""first_device_layer -> bytes left for operators on the device once KV, compute buffers and the other tensors of those
layers are there; negative: that choice does not fit."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What a placement streams to the device, and what comes with that."""

    cg: tuple[int, ...]  # elements of each operator's streamed slice
    layouts: tuple[str | None, ...]  # of CC where the split backend holds it
    token_assignment: tuple[tuple[int, int], ...]  # n_g by batch size
    settings: StreamSettings
    staging_bytes: int  # of the device: ring and activations
    twice_bytes: int  # of the host: second copies of CC
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Which operators are on the device, which are split, and from which layer on norms and KV are on the device."""

    on_device: tuple[bool, ...]
    first_device_layer: int  # n_layer: only the part behind the last block; n_layer + 1: nothing
    iterations: int
    converged: bool
    seconds: float  # predicted over the passes of the costs
    gg: tuple[int, ...] = ()  # elements of each operator's slice on the device, 0 where it is whole; (): none is split
    streams: Streams | None = None

    def slice_of(self, index: int) -> int:
        return self.gg[index] if self.gg else 0

    def streamed(self, index: int) -> int:
        """Elements of an operator's CG."""
        return self.streams.cg[index] if self.streams else 0

    def uses_device(self, n_layer: int) -> bool:
        """Whether anything is on the device: llama.cpp's part of it, or slices."""
        streams = self.streams is not None and (any(self.streams.cg) or bool(self.streams.token_assignment))
        return self.first_device_layer <= n_layer or any(self.gg) or streams


def layers(costs: Costs, budget: Budget, at_least: int = 0) -> Placed:
    """The most whole layers that fit, from the end, KV with them: `-ngl k` for the largest k (llama.cpp counts the
    output layer as one of the k, and takes it first). Layers before `at_least` are not taken."""
    n_layer = costs.graph.n_layer
    layer_of = costs.graph.operator_layer
    first = n_layer + 1
    for candidate in range(n_layer, at_least - 1, -1):
        size = sum(cost.bytes for cost, layer in zip(costs.operators, layer_of, strict=True) if layer >= candidate)
        if size > budget(candidate):
            break
        first = candidate
    on_device = tuple(
        layer >= first and cost.t_gpu_s is not None for cost, layer in zip(costs.operators, layer_of, strict=True)
    )
    return Placed(on_device, first, 1, True, placement_seconds(costs, on_device, first))


def cpu(costs: Costs) -> Placed:
    """Everything on the CPU, KV too."""
    nothing = (False,) * len(costs.operators)
    first = costs.graph.n_layer + 1
    return Placed(nothing, first, 1, True, placement_seconds(costs, nothing, first))
