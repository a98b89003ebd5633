"""Stock llama.cpp's expert cache (--moe-cache-mib, b11549): its layers, its hit rate, the cost of its misses.

The device holds the most recently used experts, in one cache for all layers of one shape. It computes batches of up to
32 tokens of these layers entirely: missed experts are uploaded first, the CPU computes none. Larger batches are
offloaded as without the cache, except for experts in it. (llama.cpp's src/llama-moe-cache.cpp)

Hit rates were replayed over the recorded routing that cost/following.py names, under its licence: all layers together,
on the second half of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from oallama.core.profile import LinearFit
from oallama.core.types import Operator
from oallama.cost.following import FEWEST_EXPERTS, rate_at
from oallama.cost.whole import Costs

MOST_TOKENS = 32
"""Most tokens of a batch that uses the cache."""

# share of all experts that have a slot: share of the uses that are served
_OF_32 = (
    (0.0, 0.0), (0.0625, 0.0), (0.125, 0.447), (0.25, 0.62), (0.375, 0.821), (0.5, 0.923), (0.625, 0.979),
    (0.75, 0.994), (1.0, 1.0),
)  # fmt: skip
_OF_128 = ((0.0, 0.0), (0.0625, 0.362), (0.125, 0.586), (0.25, 0.81), (0.375, 0.934), (0.5, 0.973), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """Layers that share a cache. operators: of each layer; share: share of all their experts that have a slot."""

    layers: tuple[tuple[int, ...], ...]
    share: float
    hits: float

    @property
    def operators(self) -> tuple[int, ...]:
        return tuple(i for layer in self.layers for i in layer)


def cached_layers(
    operators: Sequence[Operator], on_device: Sequence[bool], first_device_layer: int, n_bytes: int
) -> tuple[CachedLayers, ...]:
    """Groups of device layers whose experts are all on the host, by shape, with their parts of a cache of n_bytes;
    without groups whose part is too small for one token's experts."""
    by_layer: dict[int, list[int]] = {}
    for i, operator in enumerate(operators):
        if operator.routed and operator.layer is not None and operator.layer >= first_device_layer:
            by_layer.setdefault(operator.layer, []).append(i)
    hosted = [tuple(members) for members in by_layer.values() if not any(on_device[i] for i in members)]

    def shape(members: tuple[int, ...]) -> tuple[tuple[str, str, tuple[int, int, int]], ...]:
        return tuple((operators[i].role, operators[i].type, operators[i].shape) for i in members)

    total = sum(operators[i].bytes for members in hosted for i in members)
    groups = []
    for _, group in groupby(sorted(hosted, key=shape), key=shape):
        layers = tuple(group)
        first = [operators[i] for i in layers[0]]
        n_expert, n_used = first[0].shape[2], first[0].n_expert_used
        slot = sum(operator.bytes for operator in first) / n_expert
        budget = n_bytes * sum(operators[i].bytes for members in layers for i in members) / total
        n_slots = min(int(budget / slot) - 1, len(layers) * n_expert)  # one is kept free behind the last
        if n_slots >= n_used:
            share = n_slots / (len(layers) * n_expert)
            groups.append(CachedLayers(layers, share, lru_hits(n_expert, share)))
    return tuple(groups)


def lru_hits(n_expert: int, share: float) -> float:
    """Hit rate in decode, with slots for a share of all experts."""
    if n_expert < FEWEST_EXPERTS:
        return share  # used alike
    return rate_at(_OF_32 if n_expert < 64 else _OF_128, share)


def through_cache(
    costs: Costs, operators: Sequence[Operator], cached: Sequence[CachedLayers], link: LinearFit, issue_s: float
) -> tuple[Costs, float]:
    """(prices of small batches: these layers' experts on the device, with uploads of misses; seconds in which the host
    waits for the ids of used experts). issue_s: seconds of the thread per copy."""
    prices, waits_s = list(costs.operators), 0.0
    for group in cached:
        for i in group.operators:
            cost, mul_mat, n_expert = prices[i], operators[i].mul_mat, operators[i].shape[2]
            uploads_s = 0.0
            for p in costs.passes:
                misses = n_expert * mul_mat.share_routed(p.n_tokens) * (1.0 - group.hits)
                n_bytes = misses * operators[i].bytes / n_expert
                uploads_s += p.count * (n_bytes * link.beta_s_per_byte + misses * issue_s)
            prices[i] = replace(cost, t_gpu_s=None if cost.t_gpu_s is None else cost.t_gpu_s + uploads_s)
        rates = costs.rates
        wait_s = rates.copy_out.alpha_s + rates.copy_in.alpha_s + rates.split_s
        waits_s += len(group.layers) * wait_s * sum(p.count for p in costs.passes)
    return replace(costs, operators=tuple(prices)), waits_s


def beside_cache(costs: Costs, cached: Sequence[CachedLayers]) -> Costs:
    """Prices of large batches: experts in the cache are not streamed."""
    prices = list(costs.operators)
    for group in cached:
        for i in group.operators:
            spared_s = prices[i].streamed_s * group.share
            prices[i] = replace(
                prices[i], t_cpu_s=prices[i].t_cpu_s - spared_s, streamed_s=prices[i].streamed_s - spared_s
            )
    return replace(costs, operators=tuple(prices))
