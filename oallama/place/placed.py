"""A placement: what lies on the device, what is sliced, and placements to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oallama.core.types import Operator, StreamSettings
from oallama.cost.operators import OperatorCost
from oallama.cost.placement import Costs, placement_seconds

Budget = Callable[[int], int]
"""first_device_layer -> bytes left for operators on the device once KV, compute buffers and the other tensors of those
layers are there; negative: that choice does not fit."""


@dataclass(frozen=True, slots=True)
class Slices:
    """What the split backend holds, and what comes with that. Tuples have one entry for each operator."""

    gg: tuple[int, ...]  # elements on the device
    cg: tuple[int, ...]  # elements that are streamed
    layouts: tuple[str | None, ...]  # of CC; None where the split backend holds none
    weights_bytes: int  # of GG
    staging_bytes: int  # of the device: ring and activations
    settings: StreamSettings | None = None  # None: nothing is streamed
    token_assignment: tuple[tuple[int, int], ...] = ()  # n_g by batch size
    twice_bytes: int = 0  # of the host: second copies of CC
    hot: tuple[tuple[int, ...], ...] = ()  # of each operator: experts on the device that the host has too; or of none
    hot_bytes: int = 0  # of those on the device
    residents: bool = True  # whether blocks live on the device where their neighbours are there

    @property
    def held_bytes(self) -> int:
        """Weights on the device: of GG and of hot experts."""
        return self.weights_bytes + self.hot_bytes

    @property
    def device_bytes(self) -> int:
        """These, and what slices need beside them."""
        return self.held_bytes + self.staging_bytes

    @property
    def streams(self) -> bool:
        return any(self.cg) or bool(self.token_assignment)

    @property
    def use_device(self) -> bool:
        return any(self.gg) or any(self.hot) or self.streams


@dataclass(frozen=True, slots=True)
class Placed:
    """Which operators are on the device, which are sliced, and from which layer on norms and KV are on the device."""

    on_device: tuple[bool, ...]
    first_device_layer: int  # n_layer: only the part behind the last block; n_layer + 1: nothing
    seconds: float = 0.0  # predicted over the passes of a phase
    iterations: int = 0
    converged: bool = True
    slices: Slices | None = None
    # host layout of each operator's part in host memory; None, and of no operator: llama.cpp's choice
    layouts: tuple[str | None, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)  # how it was found, for whoever reads the plan

    def llama_uses_device(self, n_layer: int) -> bool:
        """Whether llama.cpp has anything on the device, and so streams host weights to it in large batches."""
        return self.first_device_layer <= n_layer

    def uses_device(self, n_layer: int) -> bool:
        """Whether anything is on the device: llama.cpp's part of it, or slices."""
        return self.llama_uses_device(n_layer) or (self.slices is not None and self.slices.use_device)


def nothing_there(n_operators: int, first_device_layer: int) -> Placed:
    """Every operator on the host, norms and KV of the last layers on the device."""
    return Placed((False,) * n_operators, first_device_layer)


def placed_whole(costs: Costs, on_device: Sequence[bool], first_device_layer: int) -> Placed:
    """Whole operators on their sides, with what that takes over the passes of `costs`."""
    seconds = placement_seconds(costs, on_device, first_device_layer)
    return Placed(tuple(on_device), first_device_layer, seconds, 1)


def whole_bytes(weights: Sequence[Operator | OperatorCost], on_device: Sequence[bool]) -> int:
    """Of those that are on the device."""
    return sum(each.bytes for each, there in zip(weights, on_device, strict=True) if there)


def layers(costs: Costs, budget: Budget, at_least: int = 0) -> Placed:
    """The most whole layers that fit, from the end, KV with them: `-ngl k` for the largest k (llama.cpp counts the
    output layer as one of the k, and takes it first). Layers before `at_least` are not taken."""
    n_layer = costs.graph.n_layer
    layer_of = costs.graph.operator_layer
    first, size = n_layer + 1, 0
    for candidate in range(n_layer, at_least - 1, -1):
        begin, end = costs.graph.layer_operators[candidate]
        size += sum(cost.bytes for cost in costs.operators[begin:end])
        if size > budget(candidate):
            break
        first = candidate
    operators = zip(costs.operators, layer_of, strict=True)
    return placed_whole(costs, [layer >= first and cost.t_gpu_s is not None for cost, layer in operators], first)


def cpu(costs: Costs) -> Placed:
    """Everything on the CPU, KV too."""
    return placed_whole(costs, (False,) * len(costs.operators), costs.graph.n_layer + 1)
