"""The key of a verdict, and a file in the cache for each; a file that cannot be used counts as none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from oallama import __version__
from oallama.core.files import cache_folder, write_whole
from oallama.core.profile import Profile
from oallama.gate.verdict import MOST_PAIRS, Key, Verdict
from oallama.profile.machine import fingerprint_key
from oallama.profile.store import profile_to_json, read_in_cache

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer

VERSION = 2
CLASSES = (128, 1024)  # tokens: longest prompts of a class; longer ones have one more
TYPICAL = (64, 512, 2048)  # tokens of a prompt that a class is measured for
CAP_STEP = 1.1  # caps of the device's memory that are no further apart may share a key
TIMED = ("cases", "rest", "link", "boundary", "contention", "launch_s", "launch_issue_s", "sharing", "copy_wait")
"""Keys of a profile's JSON that hold what was timed."""


def gate_key(placer: Placer, load: Workload, cap_bytes: int) -> Key:
    """Return the key of a verdict for this model, device and workload. Raises what profiling raises."""
    options = placer.options
    return {
        "model": placer.model.fingerprint,
        "machine": fingerprint_key(placer.machine),  # with the device; that of the profile unless it came from a file
        "profile": timings_digest(placer.profile()),  # other times make other plans
        "oallama": __version__,
        "n_threads": placer.threads,
        "cap": round(math.log(max(cap_bytes, 1), CAP_STEP)),
        "gpu_weights": options.gpu_weights,
        "context": max(load.n_ctx, 1).bit_length() - 1,
        "n_ubatch": load.n_ubatch,
        "ubatch_is_fixed": options.n_ubatch is not None,  # else plans may have a larger one, up to n_batch
        "n_batch": options.n_batch,
        "prompt": prompt_class(load.n_prompt),
        "n_past": load.n_past,
        **asdict(placer.attention),
    }


def prompt_class(n_prompt: int) -> int:
    return sum(n_prompt > longest for longest in CLASSES)


def timings_digest(profile: Profile) -> str:
    """16 hex digits of all that was timed, and of nothing else."""
    record = profile_to_json(profile)
    timed = {name: record.get(name) for name in TIMED}
    return hashlib.sha256(json.dumps(timed, sort_keys=True).encode()).hexdigest()[:16]


def verdict_path(key: Key) -> Path:
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    return cache_folder() / f"gate-v{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_verdict(key: Key) -> Verdict | None:
    """Read the verdict of a key; None where there is none that can be used."""
    verdict = read_in_cache(Verdict, verdict_path(key))
    return verdict if verdict is not None and verdict.key == key and _is_sound(verdict) else None


def write_verdict(verdict: Verdict) -> None:
    """Keep it, whole or not at all; where the folder cannot be written, the next run measures again."""
    path = verdict_path(verdict.key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(verdict), indent=1), private=True)


def _is_sound(verdict: Verdict) -> bool:
    """Whether its pairs are times that can be compared, and no more than are measured."""
    return (
        all(test.n_prompt > 0 and test.n_gen > 0 for test in verdict.tests)
        and (bool(verdict.tests) or not verdict.races)
        and all(len(race.pairs) < MOST_PAIRS + 2 for race in verdict.races)
        and all(1e-9 < seconds < 1e9 for race in verdict.races for pair in race.pairs for seconds in pair)
    )
