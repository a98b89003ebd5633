"""A cache file per key of a result; an unusable file is ignored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

from oallama.core.codec import to_json
from oallama.core.files import cache_folder, write_whole
from oallama.core.profile import Profile
from oallama.profile.store import profile_to_json, read_in_cache
from oallama.tuned.result import MOST_PAIRS, ClassResult, Key, TuneResult

VERSION = 4
"""Of the file. 3: stock llama.cpp b11549. 4: classes of workloads, against the fastest of stock's configurations."""

CAP_STEP = 1.1  # caps of the device's memory that are no further apart may share a key
TIMED = ("cases", "rest", "link", "boundary", "contention", "launch_s", "launch_issue_s", "sharing", "copy_wait")
"""Keys of a profile's JSON that hold what was timed."""


def memory_step(n_bytes: int) -> int:
    return round(math.log(max(n_bytes, 1), CAP_STEP))


def timings_digest(profile: Profile) -> str:
    """16 hex digits of the timings only."""
    record = profile_to_json(profile)
    timed = {name: record.get(name) for name in TIMED}
    return hashlib.sha256(json.dumps(timed, sort_keys=True).encode()).hexdigest()[:16]


def result_path(key: Key) -> Path:
    text = json.dumps(to_json(key), sort_keys=True, separators=(",", ":"))
    return cache_folder() / f"verdict-v{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_result(key: Key) -> TuneResult | None:
    """Read the result of a key; None if there is none that can be used."""
    result = read_in_cache(TuneResult, result_path(key))
    return result if result is not None and result.key == key and _is_sound(result) else None


def write_result(result: TuneResult) -> None:
    """Save it atomically; if the folder is not writable, the next run measures again."""
    path = result_path(result.key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(result), indent=1), private=True)


def _has_rival(result: ClassResult) -> bool:
    """Whether its rival is a measured option, or --fit."""
    if result.rival == 0:
        return True
    return 0 < result.rival < len(result.tries) and None not in (
        result.tries[0].speed,
        result.tries[result.rival].speed,
    )


def _is_sound(result: TuneResult) -> bool:
    """Whether its seconds can be compared, its A/B tests have no more pairs than are measured, and its plans exist."""
    classes = result.classes
    speeds = [tried.speed for class_result in classes for tried in class_result.tries if tried.speed is not None]
    speeds += [
        speed for class_result in classes for ab_test in class_result.races for pair in ab_test.pairs for speed in pair
    ]
    named = [class_result.stock_plan for class_result in classes if class_result.stock_plan]
    named += [ab_test.plan for class_result in classes for ab_test in class_result.races if not ab_test.refused]
    return (
        all(1e-9 < seconds < 1e9 for speed in speeds for seconds in (speed.prompt_s, speed.token_s))
        and all(
            class_result.n_gen > 0 and class_result.n_measured > 0 and _has_rival(class_result)
            for class_result in classes
        )
        and all(
            len(ab_test.pairs) < MOST_PAIRS + 2 and ab_test.most_late != 0
            for class_result in classes
            for ab_test in class_result.races
        )
        and all(plan in result.plans for plan in named)
    )
