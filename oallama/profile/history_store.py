"""What is known of a model's runs on a machine, in a file of the cache; a file that is no use is as good as none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from oallama.core.codec import CodecError, from_json, parse_json, to_json
from oallama.core.history import History
from oallama.profile.store import cache_folder, write_in_cache

VERSION = 1


def history_path(model_fingerprint: str, machine_fingerprint: str) -> Path:
    return cache_folder() / f"history-v{VERSION}-{machine_fingerprint[:16]}-{model_fingerprint[:16]}.json"


def read_history(model_fingerprint: str, machine_fingerprint: str) -> History:
    """What is known; an empty history where that is nothing, or nothing that can be used."""
    nothing = History(VERSION, model_fingerprint, machine_fingerprint)
    try:
        text = history_path(model_fingerprint, machine_fingerprint).read_text(encoding="utf-8")
        history = from_json(History, parse_json(text), "history")
    except (OSError, UnicodeDecodeError, CodecError):
        return nothing
    return history if _of_what(history) == _of_what(nothing) else nothing


def _of_what(history: History) -> tuple[int, str, str]:
    return history.version, history.model_fingerprint, history.machine_fingerprint


def write_history(history: History) -> None:
    """Remember it, whole or not at all. Raises ProfileError where the cache cannot be written."""
    path = history_path(history.model_fingerprint, history.machine_fingerprint)
    write_in_cache(path, json.dumps(to_json(history), allow_nan=False) + "\n")


def forget_history(model_fingerprint: str, machine_fingerprint: str) -> None:
    """The machine is measured anew."""
    with contextlib.suppress(OSError):
        history_path(model_fingerprint, machine_fingerprint).unlink()
