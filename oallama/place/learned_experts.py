"""Which experts should be hot by what was used lately: exchanged only where that is more than chance.

A window holds how often each expert of a layer was used, older uses for less (profile/routing.py). A hot expert goes
where one that is not hot was used so much more that it is expected to give GAIN hits more each token, and that by
DEVIATIONS standard deviations of the difference of two counts (Poisson), so that sets do not swing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from oallama.core.routing import Routing, Uses

HALF_LIFE_TOKENS = 256
"""Of the window that hot sets follow (docs/routing.md: what shorter and longer ones give)."""

GAIN = 0.01
"""Hits of each token."""

DEVIATIONS = 1.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of one layer."""

    comes: int
    goes: int


def exchanges(
    window: Sequence[float],
    hot: Collection[int],
    n_used: int,
    gain: float = GAIN,
    deviations: float = DEVIATIONS,
) -> tuple[Exchange, ...]:
    """Those that are worth it, the one that gains most first. window: uses by expert; hot: experts that are; n_used:
    experts of a token."""
    if not window:
        return ()
    n_tokens, held = sum(window) / n_used, set(hot)
    coming = sorted((e for e in range(len(window)) if e not in held), key=lambda e: (-window[e], e))
    going = sorted(hot, key=lambda e: (window[e], -e))
    worth = []
    for comes, goes in zip(coming, going, strict=False):
        more, noise = window[comes] - window[goes], (window[comes] + window[goes]) ** 0.5
        if more <= max(gain * n_tokens, deviations * noise):
            break
        worth.append(Exchange(comes, goes))
    return tuple(worth)


def first_windows(routing: Routing) -> dict[int, Uses]:
    """By layer, what is known of decode, with the weight of HALF_LIFE_TOKENS tokens at most."""
    windows = {}
    for layer in routing.decode:
        n_tokens = layer.window / routing.n_expert_used
        if n_tokens > 0:
            weight = min(1.0, HALF_LIFE_TOKENS / n_tokens)
            windows[layer.layer] = tuple(weight * uses for uses in layer.uses)
    return windows


def learned_sets(hot: Mapping[int, Collection[int]], windows: Mapping[int, Uses], n_used: int) -> dict[int, list[int]]:
    """By layer, the hot experts as the windows want them: each that comes in the place of the one that goes."""
    found = {}
    for layer, experts in hot.items():
        wanted = exchanges(windows.get(layer, ()), experts, n_used)
        instead = {each.goes: each.comes for each in wanted}
        found[layer] = [instead.get(expert, expert) for expert in experts]
    return found
