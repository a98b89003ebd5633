"""T', the time of an operator's device copies (OATO, section 3.2 and Algorithm 1, line 8).

Ours is the marginal cost of the edges: the cost of all device copies with the operator on the device, minus their cost
with it on the CPU, with all others where the last ranking placed them. It is negative if the operator joins its
neighbours. That T' depends on a placement is our interpretation: with a T' of the operator alone, Algorithm 1 would
have no reason to loop; the paper says that the loop follows whether operators pass data between CPU and device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from oallama.cost.graph import first_within
from oallama.cost.whole import Costs, transfer_seconds


class Transfers:
    """T' of operators, in seconds over the passes of `costs`. Layers that are alike share what is computed."""

    def __init__(self, costs: Costs, paper: bool = False) -> None:
        """paper: T' is never negative, as in Algorithm 1 read literally: a cost of loading the operator's tensors
        across devices, if its neighbours are on the other side."""
        self._costs, self._paper = costs, paper
        self._known: dict[Hashable, list[float]] = {}
        graph, kinds = costs.graph, dict[Hashable, int]()
        self._layers: list[_Layer] = []
        for layer, span in enumerate(graph.layer_operators):
            window = graph.with_neighbours(layer, layer + 1)
            first, last = graph.operators_of(window)
            kind = (graph.layers[slice(*window)], costs.offloaded[first:last], layer - window[0])
            self._layers.append(_Layer(span, window, first, last, kinds.setdefault(kind, len(kinds))))

    def of(self, on_device: Sequence[bool], first_device_layer: int, index: int) -> float:
        """T' of one operator: seconds of device copies with it on the device, minus those with it on the CPU."""
        window, sides, seconds = self._layers[self._costs.graph.operator_layer[index]].window, list(on_device), []
        for side in (True, False):
            sides[index] = side
            seconds.append(transfer_seconds(self._costs, sides, first_device_layer, window))
        added_s = seconds[0] - seconds[1]
        return max(0.0, added_s) if self._paper else added_s

    def of_all(self, on_device: Sequence[bool], first_device_layer: int) -> list[float]:
        """T' of each operator of the layers from first_device_layer on."""
        sides, t_transfer = bytes(on_device), list[float]()
        for layer in self._layers[first_device_layer:]:
            key = (layer.kind, first_within(first_device_layer, layer.window), sides[layer.first : layer.last])
            if key not in self._known:
                self._known[key] = [self.of(on_device, first_device_layer, i) for i in range(*layer.operators)]
            t_transfer += self._known[key]
        return t_transfer


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and the layers around it whose device copies change if one of its operators moves."""

    operators: tuple[int, int]  # of the layer, [first, last)
    window: tuple[int, int]  # layers whose device copies change, [first, last)
    first: int  # first operator of the window
    last: int  # end of its operators, exclusive
    kind: int  # equal for layers in which equal moves have equal costs
