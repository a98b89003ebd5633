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
from oallama.place.decide import decide
from oallama.place.placed import Placed, whole_bytes
from oallama.place.policies.stock import stock_decision
from oallama.place.problem import Decision, LoadBytes, Probe, Problem
from oallama.place.verify import on_cpu


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
            return WhatIf(card, stock, decide(problem, policy, load, "mixed", quick=True))
        except DoesNotFit:
            return WhatIf(card, stock, on_cpu(problem, load, "mixed"))
    if all(stock.placed.on_device):
        return WhatIf(card, stock, stock)
    ours = decide(problem, "auto", load, "mixed", quick=True)
    return WhatIf(card, stock, min(stock, ours, key=lambda decision: decision.predicted.total_s))
