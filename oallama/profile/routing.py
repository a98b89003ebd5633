"""Counts of used experts: recorded ids in, counts out; and the file of the cache that keeps them.

A window decays exponentially: after n tokens of a phase what was counted before them is worth 2^(-n / half-life), and
so within a recording.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from oallama.core.codec import CodecError, from_json, parse_json, to_json
from oallama.core.routing import HALF_LIFE_TOKENS, LayerRouting, Routing, RoutingPhase, Tally, Uses
from oallama.profile.store import cache_folder, write_in_cache

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


VERSION = 1
_DIGITS = 4  # of a decayed count

ENOUGH_TOKENS = 1024
"""Of a recording that answers are added to."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Recorded ids by phase and layer: arrays [n_tokens, n_expert_used], each of tokens that follow each other."""

    decode: Mapping[int, Sequence[npt.NDArray[np.int32]]]
    prompt: Mapping[int, Sequence[npt.NDArray[np.int32]]]


def halves(recordings: Sequence[Traffic]) -> tuple[Traffic, Traffic]:
    """All of it as two recordings, the first half of each layer's tokens and the second."""
    decode = [_halves([traffic.decode for traffic in recordings], side) for side in (0, 1)]
    prompt = [_halves([traffic.prompt for traffic in recordings], side) for side in (0, 1)]
    return Traffic(decode[0], prompt[0]), Traffic(decode[1], prompt[1])


def _halves(
    recordings: Sequence[Mapping[int, Sequence[npt.NDArray[np.int32]]]], side: int
) -> dict[int, list[npt.NDArray[np.int32]]]:
    found: dict[int, list[npt.NDArray[np.int32]]] = {}
    for layer in sorted({layer for recording in recordings for layer in recording}):
        runs = [run for recording in recordings for run in recording.get(layer, ())]
        cut, behind = sum(map(len, runs)) // 2, 0
        for run in runs:
            at = min(max(cut - behind, 0), len(run))
            found.setdefault(layer, []).append(run[at:] if side else run[:at])
            behind += len(run)
    return found


def unknown_routing(model_fingerprint: str, n_expert: int, n_expert_used: int) -> Routing:
    """Of a model that nothing is known of."""
    return Routing(VERSION, model_fingerprint, n_expert, n_expert_used, HALF_LIFE_TOKENS, (), ())


def counted(routing: Routing, recording: Traffic) -> Routing:
    """The routing with one recording more."""
    return replace(
        routing,
        decode=_counted(routing, "decode", recording.decode),
        prompt=_counted(routing, "prompt", recording.prompt),
    )


def tallied(
    routing: Routing, decode: Mapping[int, Tally], prompt: Mapping[int, Tally] = MappingProxyType({})
) -> Routing:
    """The routing with the uses of one answer more, by layer. The last recording goes on with them until it has
    ENOUGH_TOKENS: sets of experts are judged on it."""
    return replace(routing, decode=_tallied(routing, "decode", decode), prompt=_tallied(routing, "prompt", prompt))


def window_after(uses: Sequence[float], tally: Tally, half_life: float) -> tuple[float, ...]:
    """A window with these uses more. They count as if they had been spread evenly over their tokens."""
    n = tally.n_tokens
    fades = 2.0 ** (-n / half_life)
    weight = (1 - fades) / (n * (1 - 2.0 ** (-1 / half_life)))
    return tuple(round(fades * old + weight * new, _DIGITS) for old, new in zip(uses, tally.uses, strict=True))


def _tallied(routing: Routing, phase: RoutingPhase, tallies: Mapping[int, Tally]) -> tuple[LayerRouting, ...]:
    nothing = (0.0,) * routing.n_expert
    known = {layer.layer: layer for layer in routing.layers(phase)}
    for index, tally in tallies.items():
        if tally.n_tokens:
            old = known.get(index, LayerRouting(index, 0, nothing, nothing, nothing))
            goes_on = 0 < sum(old.latest) < ENOUGH_TOKENS * routing.n_expert_used
            latest = zip(old.latest if goes_on else nothing, tally.uses, strict=True)
            known[index] = replace(
                old,
                n_tokens=old.n_tokens + tally.n_tokens,
                uses=window_after(old.uses, tally, routing.half_life_tokens),
                before=old.before if goes_on else old.uses,
                latest=tuple(float(first + more) for first, more in latest),
            )
    return tuple(known[index] for index in sorted(known))


def _counted(
    routing: Routing, phase: RoutingPhase, recording: Mapping[int, Sequence[npt.NDArray[np.int32]]]
) -> tuple[LayerRouting, ...]:
    nothing = (0.0,) * routing.n_expert
    known = {layer.layer: layer for layer in routing.layers(phase)}
    for index, runs in recording.items():
        if any(len(ids) for ids in runs):
            old = known.get(index, LayerRouting(index, 0, nothing, nothing, nothing))
            known[index] = _with_tokens(old, runs, routing.half_life_tokens)
    return tuple(known[index] for index in sorted(known))


def _with_tokens(old: LayerRouting, runs: Sequence[npt.NDArray[np.int32]], half_life: float) -> LayerRouting:
    import numpy as np

    n_expert = len(old.uses)
    ids = np.concatenate([run for run in runs if len(run)])
    n_tokens, n_used = ids.shape
    age = np.arange(n_tokens - 1, -1, -1)
    weights = np.repeat(np.exp2(-age / half_life), n_used)
    flat = ids.ravel()
    window = np.asarray(old.uses) * 2.0 ** (-n_tokens / half_life)
    window = window + np.bincount(flat, weights=weights, minlength=n_expert)
    return LayerRouting(
        old.layer,
        old.n_tokens + n_tokens,
        _uses(window.round(_DIGITS)),
        before=old.uses,
        latest=_uses(np.bincount(flat, minlength=n_expert)),
    )


def _uses(counts: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> Uses:
    return tuple(float(count) for count in counts)


#
# the cache
#


MOST_USES = 2**53  # of an expert: beyond, adding one changes nothing


def routing_path(model_fingerprint: str, folder: Path | None = None) -> Path:
    return (folder or cache_folder()) / f"routing-v{VERSION}-{model_fingerprint[:16]}.json"


def read_routing(model_fingerprint: str, n_expert: int, n_expert_used: int) -> Routing | None:
    """What is known of this model; None where there is nothing, or nothing that can be used."""
    try:
        text = routing_path(model_fingerprint).read_text(encoding="utf-8")
        routing = from_json(Routing, parse_json(text), "routing")
    except (OSError, UnicodeDecodeError, CodecError):
        return None
    expected = (VERSION, model_fingerprint, n_expert, n_expert_used)
    found = (routing.version, routing.model_fingerprint, routing.n_expert, routing.n_expert_used)
    sound = all(_is_sound(layers, n_expert) for layers in (routing.decode, routing.prompt))
    return routing if found == expected and routing.half_life_tokens >= 1 and sound else None


def write_routing(routing: Routing) -> None:
    """Remember it, whole or not at all. Raises ProfileError where the cache cannot be written."""
    text = json.dumps(to_json(routing), allow_nan=False, separators=(",", ":"))
    write_in_cache(routing_path(routing.model_fingerprint), text + "\n")


def _is_sound(layers: tuple[LayerRouting, ...], n_expert: int) -> bool:
    """Whether every layer is there once, in order, and has a count for each expert that traffic can have."""
    indices = [layer.layer for layer in layers]
    counts = [uses for layer in layers for uses in (layer.uses, layer.before, layer.latest)]
    sound = all(len(uses) == n_expert and max(uses) < MOST_USES for uses in counts)
    return sound and indices == sorted(set(indices))
