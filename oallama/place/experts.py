"""Hot experts: which experts of a layer are kept whole on the device, their gate, up and down together.

An operator of E experts is E operators that share one crossing. What expert e on the device saves each token is
u_e (T_c - T_g), u_e being the share of tokens that use it; all experts that a layer has there pay its T' once. By bytes
that is OATO's affinity, with M the bytes of one expert. Of a layer's experts the most used are the best ones, whatever
their number, so a layer has E + 1 choices, and all layers together are a multiple-choice knapsack. It is solved
exactly (dynamic programming over bytes), unless the sizes of experts have so small a common divisor that they are
rounded up to MOST_UNITS parts of the room: what is chosen then fits all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from oallama.core.types import Operator
from oallama.cost.operators import OperatorCost

MOST_UNITS = 1 << 16


@dataclass(frozen=True)
class ExpertPrice:
    """What one expert of a layer costs: gate, up and down together. Seconds of one token."""

    layer: int
    n_expert: int
    bytes: int  # M
    t_cpu_s: float  # T_c
    t_gpu_s: float  # T_g
    join_s: float  # T': of a layer with experts on both sides, each token
    whole_s: float = 0.0  # T' where all experts are on the device

    @property
    def saved_s(self) -> float:
        """By an expert that every token uses."""
        return self.t_cpu_s - self.t_gpu_s


@dataclass(frozen=True)
class HotLayer:
    """A layer's experts, the most used first, and what any number of them saves each token."""

    price: ExpertPrice
    use: tuple[float, ...]  # of each expert, 0 to 1

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Of equals the first one first."""
        return tuple(sorted(range(len(self.use)), key=lambda expert: (-self.use[expert], expert)))

    @cached_property
    def saved_s(self) -> tuple[float, ...]:
        """By the n most used experts, n from 0 to E, after T'. Not above 0: the layer is better left alone."""
        saved, gained = [0.0], 0.0
        for n, expert in enumerate(self.order, 1):
            gained += self.use[expert] * self.price.saved_s
            saved.append(gained - (self.price.whole_s if n == len(self.use) else self.price.join_s))
        return tuple(saved)


def expert_prices(
    operators: Sequence[Operator], costs: Sequence[OperatorCost], n_tokens: int, join_s: float, whole_s: float = 0.0
) -> tuple[ExpertPrice, ...]:
    """The price of each layer whose operators of experts the device can compute.

    costs: of the operators, over passes of n_tokens single tokens. join_s, whole_s: seconds that the crossing of one
    layer takes each token.
    """
    layers: dict[int, list[tuple[Operator, OperatorCost]]] = {}
    for operator, cost in zip(operators, costs, strict=True):
        if (layer := _layer_of_experts(operator)) is not None:
            layers.setdefault(layer, []).append((operator, cost))
    prices = []
    for layer, parts in layers.items():
        on_device = [cost.t_gpu_s for _, cost in parts if cost.t_gpu_s is not None]
        if len(on_device) == len(parts):
            n_expert, n_used = parts[0][0].shape[2], parts[0][0].n_expert_used
            each = n_used * n_tokens
            prices.append(
                ExpertPrice(
                    layer,
                    n_expert,
                    sum(operator.bytes // n_expert for operator, _ in parts),
                    sum(cost.t_cpu_s for _, cost in parts) / each,
                    sum(on_device) / each,
                    join_s,
                    whole_s,
                )
            )
    return tuple(prices)


def expert_affinities(price: ExpertPrice, use: Sequence[float], n_hot: int) -> tuple[float, ...]:
    """Seconds saved each token for each byte of an expert, by expert: (u_e (T_c - T_g) - T' / n_hot) / M, n_hot experts
    of the layer sharing the crossing."""
    crossing_s = price.whole_s if n_hot == price.n_expert else price.join_s
    return tuple((each * price.saved_s - crossing_s / n_hot) / price.bytes for each in use)


def break_even_coverage(price: ExpertPrice, n_used: int, share: float) -> float:
    """The coverage that a hot set of this share of the experts needs to save more than a slice of the same bytes
    through all experts would without a crossing: coverage - share is then worth T'. Above 1: no hot set is worth it."""
    worth_s = n_used * price.saved_s
    return share + price.join_s / worth_s if worth_s > 0 else float("inf")


def hot_experts(
    use_per_token: Mapping[int, Sequence[float]], prices: Sequence[ExpertPrice], available_bytes: int
) -> dict[int, tuple[int, ...]]:
    """The experts to keep on the device, ascending, by layer, that save the most seconds each token within the bytes;
    layers without any are left out. Of equal savings the one with fewer experts in the later layers.

    use_per_token: by layer, the share of tokens that use each expert (Routing.use_per_token); a layer that is not in it
    stays as it is.
    """
    layers = [HotLayer(price, tuple(use_per_token[price.layer])) for price in prices if price.layer in use_per_token]
    if not layers or available_bytes <= 0:
        return {}
    unit = gcd(*(layer.price.bytes for layer in layers))
    unit = max(unit, -(-available_bytes // MOST_UNITS))
    counts = _best_counts([(layer.saved_s, -(-layer.price.bytes // unit)) for layer in layers], available_bytes // unit)
    chosen = {layer.price.layer: tuple(sorted(layer.order[:n])) for layer, n in zip(layers, counts, strict=True)}
    return {layer: experts for layer, experts in chosen.items() if experts}


def of_operators(operators: Sequence[Operator], hot: Mapping[int, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The hot experts of each operator: those of its layer, for gate, up and down alike."""
    layers = map(_layer_of_experts, operators)
    return tuple(() if layer is None else hot.get(layer, ()) for layer in layers)


def _layer_of_experts(operator: Operator) -> int | None:
    """The layer whose routed experts the operator is a part of."""
    is_part = operator.op == "MUL_MAT_ID" and operator.role.endswith("_exps")
    return operator.layer if is_part else None


def _best_counts(menus: Sequence[tuple[Sequence[float], int]], room: int) -> list[int]:
    """How many experts of each layer. menus: (seconds saved by 0, 1, … experts, units of one expert) of each layer;
    room: units of all."""
    import numpy as np

    room = min(room, sum((len(saved) - 1) * size for saved, size in menus))
    best = np.zeros(room + 1)  # seconds saved by the layers so far within so many units
    taken = []
    for saved, size in menus:
        now, count = best.copy(), np.zeros(room + 1, dtype=np.int32)
        for n in range(1, min(len(saved) - 1, room // size) + 1):
            if saved[n] > 0:
                reached = best[: room + 1 - n * size] + saved[n]
                better = reached > now[n * size :]
                now[n * size :][better] = reached[better]
                count[n * size :][better] = n
        best = now
        taken.append((count, size))
    counts, left = [], room
    for count, size in reversed(taken):
        counts.append(int(count[left]))
        left -= counts[-1] * size
    return counts[::-1]
