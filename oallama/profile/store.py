"""Profiles as JSON, and the cache of measured profiles: one file per machine, device and thread count, which grows
model by model.

History of the format
  1  cases, rest, link, boundary, contention, launch_s, skipped, warnings; every case with its raw samples. Since
     0.1 (2026-11-21) rest has the same batch and depth with and without flash attention, and type_k and type_v, which
     are left out where they are f16; link also has issue_pinned and issue_pageable; sharing, copy_wait and
     launch_issue_s are left out where nothing of them was measured. `contention` repeats the ("cpu", "link") row of
     `sharing` at the smallest batch size, and is not read.

Unknown versions are refused: measuring again is cheaper than a wrong number.

The file is always replaced whole. An interrupted measurement is saved up to that point. One lock serves all files, as
two measurements would disturb each other.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from oallama.core.codec import CodecError, from_json, parse_json, to_json
from oallama.core.errors import ProfileError, UsageError
from oallama.core.files import FOLDER_VARIABLE, cache_folder, lock_file, open_lock, read_text, write_whole
from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.profile import Profile
from oallama.profile.machine import fingerprint_key

T = TypeVar("T")

VERSION = 1
READABLE_VERSIONS = (1,)

_REMEDY = "measure it again with `oallama profile MODEL --refresh`"

#
# JSON
#


def profile_from_json(document: Any) -> Profile:
    """The profile of a JSON object. Unknown keys are ignored; what is missing, of a wrong type or of an unknown version
    raises ProfileError that names it."""
    if not isinstance(document, dict):
        raise ProfileError(f"not a valid profile: it must be a JSON object; {_REMEDY}")
    version = document.get("version")
    if version not in READABLE_VERSIONS or isinstance(version, bool):
        known = ", ".join(map(str, READABLE_VERSIONS))
        raise ProfileError(f"unknown profile version {version!r} (known: {known}); {_REMEDY}")
    try:
        profile = from_json(Profile, document, "profile")
        for i, case in enumerate(profile.cases):
            if case.mul_mat.type not in GGML_TYPES_BY_NAME:
                raise CodecError(f"profile.cases[{i}]: unknown ggml type {case.mul_mat.type!r}")
            if case.mul_mat.op not in ("MUL_MAT", "MUL_MAT_ID"):
                raise CodecError(f"profile.cases[{i}]: op {case.mul_mat.op!r} is neither MUL_MAT nor MUL_MAT_ID")
            if not max(case.gb_per_s, case.gflops) < math.inf:
                raise CodecError(f"profile.cases[{i}]: {case.seconds:g} s is too short for this work")
    except CodecError as error:
        raise ProfileError(f"{error}; {_REMEDY}") from None
    return profile


def read_profile(path: str | Path) -> Profile:
    """The profile in a file (`--profile FILE`). Raises ProfileError: cannot be read, not JSON, not a known profile; its
    exit code is that of unusable input."""
    try:
        return profile_from_json(parse_json(read_text(path)))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        fault = ProfileError(f"cannot read the profile {path}: {reason}; {_REMEDY}")
    except CodecError:
        fault = ProfileError(f"{path} is not valid JSON; {_REMEDY}")
    except ProfileError as error:
        fault = ProfileError(f"{path}: {error}")
    fault.exit_code = UsageError.exit_code
    raise fault


#
# the cache
#


def profile_path(fingerprint: dict[str, Any]) -> Path:
    """The file for profiles of this machine, device and thread count."""
    return cache_folder() / f"profile-v{VERSION}-{fingerprint_key(fingerprint)}.json"


def busy_path(path: Path) -> Path:
    """The file of the profile measured while other programs used the CPU, which is used only while they do."""
    return path.with_suffix(".busy.json")


def load(path: Path, warn: Callable[[str], None]) -> Profile | None:
    """The stored profile; None if it is missing, or damaged (warn is then called)."""
    try:
        return read_profile(path) if path.exists() else None
    except OSError:  # the folder cannot be looked into
        return None
    except ProfileError as error:
        warn(f"ignoring the cached profile and measuring again: {error}")
        return None


def write_in_cache(path: Path, record: Any) -> None:
    """Create or replace the cache file of a record. Raises ProfileError if the folder is not writable."""
    write_text_in_cache(path, json.dumps(to_json(record), indent=1, allow_nan=False) + "\n")


def write_text_in_cache(path: Path, text: str) -> None:
    """Create or replace a cache file readable only by its owner. Raises ProfileError if the folder is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, private=True)
    except OSError as error:
        raise ProfileError(
            f"cannot save profiles in {path.parent}: {error.strerror or error}; "
            f"set {FOLDER_VARIABLE} to a writable folder"
        ) from None


@contextlib.contextmanager
def measuring_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock for measuring on this machine; on_wait is called once if another process holds it. The lock ends
    with the process. There is none if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / "measuring.lock")
    except OSError:
        yield
        return
    with file:
        lock_file(file, on_wait)
        yield


def read_in_cache(kind: type[T], path: Path) -> T | None:
    """Read a record of the cache; None if it is missing or unusable."""
    try:
        return from_json(kind, parse_json(read_text(path)), path.name)
    except (OSError, ValueError):
        return None
