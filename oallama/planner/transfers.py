"""T', the time that an operator's device copies between CPU and device take (OATO, section 3.2 and Algorithm 1, line
8).

Ours is the marginal cost of the edges: what device copies cost with the operator on the device less what they cost with
it on the CPU, everything else being where the last ranking puts it. It is negative where the operator joins its
neighbours there. That T' needs a placement is an interpretation: a T' of the operator alone would leave Algorithm 1
nothing to repeat, but its loop is said to follow whether operators pass data between CPU and device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from oallama.cost.graph import first_within
from oallama.cost.whole import Costs, transfer_seconds


class Transfers:
    """T' of operators, in seconds over the passes of `costs`. Layers that are alike share what is computed."""

    def __init__(self, costs: Costs, paper: bool = False) -> None:
        """paper: as Algorithm 1 reads literally, the load of the operator's tensors across devices, charged to a
        candidate whose neighbours are on the other side: never negative."""
        self._costs, self._paper = costs, paper
        self._known: dict[Hashable, list[float]] = {}
        graph, kinds = costs.graph, dict[Hashable, int]()
        self._layers: list[_Layer] = []
        for layer, span in enumerate(graph.layer_operators):
            window = graph.around(layer, layer + 1)
            first, last = graph.operators_of(window)
            kind = (graph.layers[slice(*window)], costs.offloaded[first:last], layer - window[0])
            self._layers.append(_Layer(span, window, first, last, kinds.setdefault(kind, len(kinds))))

    def of(self, on_device: Sequence[bool], first_device_layer: int, index: int) -> float:
        """Device copies with the operator on the device less those with it on the CPU."""
        window, sides, seconds = self._layers[self._costs.graph.operator_layer[index]].window, list(on_device), []
        for side in (True, False):
            sides[index] = side
            seconds.append(transfer_seconds(self._costs, sides, first_device_layer, window))
        added_s = seconds[0] - seconds[1]
        return max(0.0, added_s) if self._paper else added_s

    def of_all(self, on_device: Sequence[bool], first_device_layer: int) -> list[float]:
        """T' of each operator of the layers from first_device_layer on."""
        sides, found = bytes(on_device), list[float]()
        for layer in self._layers[first_device_layer:]:
            key = (layer.kind, first_within(first_device_layer, layer.window), sides[layer.first : layer.last])
            if key not in self._known:
                self._known[key] = [self.of(on_device, first_device_layer, i) for i in range(*layer.operators)]
            found += self._known[key]
        return found


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and what changes where one of its operators moves."""

    operators: tuple[int, int]  # [first, last)
    window: tuple[int, int]  # layers whose device copies change, [first, last)
    first: int  # operator of these layers
    last: int  # behind the last of them
    kind: int  # the same for layers in which the same moves cost the same
