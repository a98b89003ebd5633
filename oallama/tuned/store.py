"""A cache file per key of a result; an unusable file is ignored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path

from oallama.core.codec import to_json
from oallama.core.errors import ProfileError
from oallama.core.files import cache_folder
from oallama.core.profile import Profile
from oallama.profile.store import read_in_cache, write_in_cache
from oallama.tuned.result import Key, TuneResult

VERSION = 4
"""Of the file. 3: stock llama.cpp b11549. 4: classes of workloads, against the fastest of stock's configurations."""

CAP_STEP = 1.1  # caps of the device's memory that are no further apart may share a key
TIMED = ("cases", "rest", "link", "boundary", "contention", "launch_s", "launch_issue_s", "sharing", "copy_wait")
"""Keys of a profile's JSON that hold what was timed."""


def memory_step(n_bytes: int) -> int:
    return round(math.log(max(n_bytes, 1), CAP_STEP))


def timings_digest(profile: Profile) -> str:
    """16 hex digits of the timings only."""
    record = to_json(profile)
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
    with contextlib.suppress(ProfileError):
        write_in_cache(result_path(result.key), result)


def _is_sound(tuned: TuneResult) -> bool:
    """Whether its seconds can be compared, each rival but --fit was measured, as --fit was, and all plans exist."""
    ab_tests = [ab_test for result in tuned.classes for ab_test in result.races]
    speeds = [stock_trial.speed for result in tuned.classes for stock_trial in result.tries if stock_trial.speed]
    speeds += [speed for ab_test in ab_tests for pair in ab_test.pairs for speed in pair]
    rivals = [(result.tries, result.rival) for result in tuned.classes if result.rival]
    plans = [result.stock_plan for result in tuned.classes if result.stock_plan]
    plans += [ab_test.plan for ab_test in ab_tests if not ab_test.refused]
    return (
        all(1e-9 < seconds < 1e9 for speed in speeds for seconds in (speed.prompt_s, speed.token_s))
        and all(rival < len(tries) and tries[0].speed and tries[rival].speed for tries, rival in rivals)
        and tuned.plans.keys() >= {*plans}
    )
