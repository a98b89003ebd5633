"""Expert use counts: adding those of an answer, and their cache file.

A window decays exponentially: after n tokens of a phase what was counted before them is worth 2^(-n / half-life).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oallama.core.files import cache_folder
from oallama.core.routing import HALF_LIFE_TOKENS, ExpertCounts, LayerCounts, LayerRouting, Routing
from oallama.profile.store import read_in_cache, write_in_cache

VERSION = 1
_DIGITS = 4  # of a decayed count

LEAST_TOKENS, ENOUGH_TOKENS = 64, 1024
"""Bounds of the tokens of a recording, which otherwise continues over answers until it has as many tokens as all
earlier ones."""


def unknown_routing(model_fingerprint: str, n_expert: int, n_expert_used: int) -> Routing:
    """The routing of a model without counts."""
    return Routing(VERSION, model_fingerprint, n_expert, n_expert_used, HALF_LIFE_TOKENS, (), ())


def counted(routing: Routing, expert_counts: ExpertCounts) -> Routing:
    """The routing with the counts of a further answer. They extend the last recording (on which sets of experts are
    judged), or begin a new one if that has enough tokens."""
    return replace(
        routing,
        decode=_counted(routing, routing.decode, expert_counts.decode),
        prompt=_counted(routing, routing.prompt, expert_counts.prompt),
    )


def window_after(uses: Sequence[float], layer_counts: LayerCounts, half_life: float) -> tuple[float, ...]:
    """A window with further uses, assumed to be spread evenly over their tokens."""
    n = layer_counts.n_tokens
    fades = 2.0 ** (-n / half_life)
    weight = (1 - fades) / (n * (1 - 2.0 ** (-1 / half_life)))
    return tuple(round(fades * old + weight * new, _DIGITS) for old, new in zip(uses, layer_counts.uses, strict=True))


def _order_after(
    known: Sequence[float], layer_counts: LayerCounts, uses: tuple[int, ...], half_life: float
) -> tuple[float, ...]:
    """Ranks or gaps of a window with further ones; unchanged if there are none."""
    if not uses:
        return tuple(known)
    return window_after(known or (0.0,) * len(uses), replace(layer_counts, uses=uses), half_life)


def _counted(
    routing: Routing, layers: Sequence[LayerRouting], counts_by_layer: Mapping[int, LayerCounts]
) -> tuple[LayerRouting, ...]:
    nothing = (0.0,) * routing.n_expert
    layer_routings = {layer.layer: layer for layer in layers}
    for index, layer_counts in counts_by_layer.items():
        if layer_counts.n_tokens:
            old = layer_routings.get(index, LayerRouting(index, 0, nothing, nothing, nothing))
            n_latest = sum(old.latest) / routing.n_expert_used
            goes_on = 0 < n_latest < min(max(old.n_tokens - n_latest, LEAST_TOKENS), ENOUGH_TOKENS)
            latest = zip(old.latest if goes_on else nothing, layer_counts.uses, strict=True)
            layer_routings[index] = LayerRouting(
                index,
                old.n_tokens + layer_counts.n_tokens,
                window_after(old.uses, layer_counts, routing.half_life_tokens),
                before=old.before if goes_on else old.uses,
                latest=tuple(float(first + more) for first, more in latest),
                ranks=_order_after(old.ranks, layer_counts, layer_counts.ranks, routing.half_life_tokens),
                gaps=_order_after(old.gaps, layer_counts, layer_counts.gaps, routing.half_life_tokens),
            )
    return tuple(layer_routings[index] for index in sorted(layer_routings))


#
# the cache
#


N_GAPS = 12  # as split/uses.h counts
MOST_USES = 2**53  # of an expert: beyond, adding one changes nothing
LONGEST_HALF_LIFE = 2**40  # tokens: beyond, a count fades by nothing from one token to the next


def routing_path(model_fingerprint: str) -> Path:
    return cache_folder() / f"routing-v{VERSION}-{model_fingerprint[:16]}.json"


def read_routing(model_fingerprint: str, n_expert: int, n_expert_used: int) -> Routing | None:
    """Read the counts of this model; None if they are missing or unusable."""
    routing = read_in_cache(Routing, routing_path(model_fingerprint))
    if routing is None:
        return None
    expected = (VERSION, model_fingerprint, n_expert, n_expert_used)
    identity = (routing.version, routing.model_fingerprint, routing.n_expert, routing.n_expert_used)
    sound = all(_is_sound(layers, n_expert) for layers in (routing.decode, routing.prompt))
    sound = sound and 1 <= routing.half_life_tokens <= LONGEST_HALF_LIFE
    return routing if identity == expected and sound else None


def write_routing(routing: Routing) -> None:
    """Save it atomically. Raises ProfileError if the cache cannot be written."""
    write_in_cache(routing_path(routing.model_fingerprint), routing)


def _is_sound(layers: tuple[LayerRouting, ...], n_expert: int) -> bool:
    """Whether each layer occurs once, in order, with a count for each expert."""
    indices = [layer.layer for layer in layers]
    counts = [uses for layer in layers for uses in (layer.uses, layer.before, layer.latest)]
    counts += [layer.ranks for layer in layers if layer.ranks]
    sound = all(len(uses) == n_expert and max(uses) < MOST_USES for uses in counts)
    sound = sound and all(
        len(layer.gaps) in (0, N_GAPS) and max(layer.gaps, default=0.0) < MOST_USES for layer in layers
    )
    return sound and indices == sorted(set(indices))
