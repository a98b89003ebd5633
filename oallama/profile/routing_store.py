"""What is known of a model's routing, in a file of the cache: one for each model; a file that is no use is as good as
none."""

from __future__ import annotations

import json
from pathlib import Path

from oallama.core.codec import CodecError, from_json, parse_json, to_json
from oallama.core.routing import LayerRouting, Routing
from oallama.profile.routing import VERSION
from oallama.profile.store import cache_folder, write_in_cache

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
