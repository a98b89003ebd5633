"""What a card that is not there would give: stock llama.cpp's --fit and our best plan, priced on a described profile.

The ledger has no load on the card behind it: KV cache and compute buffers are those of a dry load on the CPU. The
card's compute buffers are taken to be as large, its KV cache in proportion to the layers there. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oallama.core.errors import DoesNotFit
from oallama.core.types import Operator, Workload
from oallama.device.card import Card
from oallama.place.budget import DeviceMemory
from oallama.place.decide import FIT, decide
from oallama.place.placed import Placed, whole_bytes
from oallama.place.problem import (
    Decision,
    LoadBytes,
    Probe,
    Problem,
    measured,
    on_cpu,
    operators_limit,
    operators_on_host,
)
from oallama.place.sliced import QUICK
from oallama.place.stock_fit import priced_stock_fit


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What a model takes on the CPU alone, bytes: all weights, KV cache, compute buffers."""

    weights: int
    kv: int
    compute: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is predicted for one card."""

    card: Card
    stock: Decision  # policy FIT
    best: Decision  # the same one where nothing is predicted to be faster; or the plan of the policy asked for

    @property
    def fits_whole(self) -> bool:
        return all(self.stock.placed.on_device)

    @property
    def gain(self) -> float:
        """How many times faster the best is over the workload."""
        return self.stock.predicted.total_s / self.best.predicted.total_s


def probe_of(host: HostLoad, operators: Sequence[Operator], n_layer: int, memory_bytes: int) -> Probe:
    """What a load on a card with so much free memory would say. Norms and biases are taken to weigh nothing there."""

    def probe(load: Workload, placed: Placed) -> LoadBytes:
        on_card = whole_bytes(operators, placed.on_device)
        n_layers = max(0, n_layer - placed.first_device_layer)
        return LoadBytes(
            weights_gpu=on_card,
            weights_host=host.weights - on_card,
            kv=host.kv * n_layers // n_layer,
            compute=host.compute if placed.llama_uses_device(n_layer) else 0,
            device_free=memory_bytes,
        )

    return probe


def what_if(problem: Problem, card: Card, load: Workload, policy: str = "auto") -> WhatIf:
    """Both plans for a card. problem: with the card's described profile, and probe_of. policy: whose plan is compared
    with stock; one that does not fit leaves everything on the CPU."""
    stock = stock_decision(problem, load)
    if policy != "auto":
        try:
            return WhatIf(card, stock, decide(problem, policy, load, "mixed", effort=QUICK))
        except DoesNotFit:
            return WhatIf(card, stock, on_cpu(problem, load, "mixed"))
    if all(stock.placed.on_device):
        return WhatIf(card, stock, stock)
    ours = decide(problem, "auto", load, "mixed", effort=QUICK)
    return WhatIf(card, stock, min(stock, ours, key=lambda decision: decision.predicted.total_s))


def stock_decision(problem: Problem, load: Workload) -> Decision:
    """--fit's placement on the card, with its ledger."""
    costs, placed, predicted = priced_stock_fit(problem, load, stock_memory(problem, load))
    memory = measured(problem, load, placed, problem.probe(load, placed).device_free)
    return Decision(FIT, load, costs, placed, memory, predicted, ())


def stock_memory(problem: Problem, load: Workload) -> DeviceMemory:
    """The device's memory for stock llama.cpp, which keeps its micro-batch: with norms and KV of all layers there."""
    taken = problem.probe(load, operators_on_host(problem, load))
    return DeviceMemory(
        problem.capacity(taken), problem.vram_fill, taken.kv, taken.compute, taken.weights_gpu, problem.graph.n_layer,
        operators_limit(problem),
    )  # fmt: skip
