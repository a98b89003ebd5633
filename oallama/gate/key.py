"""Key of a verdict: model, machine, device, options, and classes of prompt and generation lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oallama import __version__
from oallama.core.profile import Profile
from oallama.profile.machine import fingerprint_key
from oallama.profile.store import profile_to_json

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer

Key = Mapping[str, Any]
"""What a verdict holds for: text and numbers."""

LENGTHS = ("prompt_class", "gen_class")
TIMED = ("cases", "rest", "link", "boundary", "contention", "launch_s", "launch_issue_s", "sharing", "copy_wait")
"""Of a profile's JSON."""


def gate_key(placer: Placer, load: Workload) -> Key:
    """What a verdict for this model, device and workload holds for. Counts of tokens that are alike share a class."""
    options = placer.options
    return {
        "model": placer.model.fingerprint,
        "machine": fingerprint_key(placer.machine),  # that of the profile unless it came from a file
        "profile": timings_digest(placer.profile()),  # other times make other plans
        "oallama": __version__,
        "n_threads": placer.threads,
        "depth_class": size_class(load.n_ctx),
        "prompt_class": length_class(load.n_prompt),
        "gen_class": length_class(load.n_gen),
        **({"past_class": length_class(load.n_past)} if load.n_past else {}),
        "n_ubatch": load.n_ubatch,
        "ubatch_is_fixed": options.n_ubatch is not None,  # else plans may have a larger one, up to n_batch
        "n_batch": options.n_batch,
        **asdict(placer.attention),
        **{name: getattr(options, name) for name in ("vram", "vram_fill", "gpu_weights")},
    }


def timings_digest(profile: Profile) -> str:
    """16 hex digits of all that was timed, and of nothing else."""
    record = profile_to_json(profile)
    timed = {name: record.get(name) for name in TIMED}
    return hashlib.sha256(json.dumps(timed, sort_keys=True).encode()).hexdigest()[:16]


def distance(key: Key, other: Key) -> int | None:
    """How many classes of prompt and generation two keys are apart; None where they differ in anything else."""
    if {**key, **dict.fromkeys(LENGTHS)} != {**other, **dict.fromkeys(LENGTHS)}:
        return None
    if not all(isinstance(each.get(name), int) for each in (key, other) for name in LENGTHS):
        return None
    return sum(abs(int(key[name]) - int(other[name])) for name in LENGTHS)


def size_class(n_tokens: int) -> int:
    """The power of two that a count of tokens is nearest below: counts of one class are alike."""
    return max(n_tokens, 1).bit_length() - 1


def length_class(n_tokens: int) -> int:
    """The power of eight that a count of tokens is nearest below: what to weigh prompt against generation by."""
    return size_class(n_tokens) // 3
