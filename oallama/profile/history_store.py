"""Store of histories: a file of the cache for each model and machine. A file that cannot be used counts as none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from oallama.core.codec import CodecError, from_json, parse_json, to_json
from oallama.core.history import History
from oallama.core.profile import Profile
from oallama.profile.store import cache_folder, write_in_cache

VERSION = 1


def history_path(model_fingerprint: str, machine: str) -> Path:
    """The file for a model; machine: the key of the profile's fingerprint."""
    return cache_folder() / f"history-v{VERSION}-{machine}-{model_fingerprint[:16]}.json"


def timings_of(profile: Profile) -> str:
    """16 hex digits of what a history corrects: other ones were measured anew."""
    cases = [(str(case.key), case.seconds) for case in profile.cases]
    link = [(name, fit.alpha_s, fit.beta_s_per_byte) for name, fit in sorted(profile.link.items())]
    return hashlib.sha256(repr((cases, link)).encode()).hexdigest()[:16]


def read_history(model_fingerprint: str, machine: str, timings: str) -> History:
    """What is known beside a profile of these timings; an empty history where that is nothing, or no use."""
    nothing = History(VERSION, model_fingerprint, timings)
    try:
        text = history_path(model_fingerprint, machine).read_text(encoding="utf-8")
        history = from_json(History, parse_json(text), "history")
    except (OSError, UnicodeDecodeError, CodecError):
        return nothing
    found = (history.version, history.model_fingerprint, history.profile)
    return history if found == (VERSION, model_fingerprint, timings) else nothing


def write_history(history: History, machine: str) -> None:
    """Remember it, whole or not at all. Raises ProfileError where the cache cannot be written."""
    path = history_path(history.model_fingerprint, machine)
    write_in_cache(path, json.dumps(to_json(history), allow_nan=False) + "\n")
