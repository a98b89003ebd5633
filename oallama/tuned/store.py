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
    tries = result.tries
    return 0 < result.rival < len(tries) and None not in (tries[0].speed, tries[result.rival].speed)


def _is_sound(tuned: TuneResult) -> bool:
    """Whether its seconds can be compared, its A/B tests have no more pairs than are measured, and its plans exist."""
    results = tuned.classes
    ab_tests = [ab_test for result in results for ab_test in result.races]
    speeds = [stock_try.speed for result in results for stock_try in result.tries if stock_try.speed is not None]
    speeds += [speed for ab_test in ab_tests for pair in ab_test.pairs for speed in pair]
    named = [result.stock_plan for result in results if result.stock_plan]
    named += [ab_test.plan for ab_test in ab_tests if not ab_test.refused]
    return (
        all(1e-9 < seconds < 1e9 for speed in speeds for seconds in (speed.prompt_s, speed.token_s))
        and all(result.n_gen > 0 and result.n_measured > 0 and _has_rival(result) for result in results)
        and all(len(ab_test.pairs) < MOST_PAIRS + 2 and ab_test.most_late != 0 for ab_test in ab_tests)
        and all(plan in tuned.plans for plan in named)
    )
