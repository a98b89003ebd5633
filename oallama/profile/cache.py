"""Where measured profiles are kept: one file per machine, device and thread count, which grows model by model.

Every finished case is appended at once to a journal beside that file; the file itself is only ever replaced whole. So
an interruption loses nothing, and the file never holds half a measurement. One lock serves all files: two measurements
at once would spoil each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oallama.core.errors import ProfileError
from oallama.core.types import Profile
from oallama.profile.machine import fingerprint_key
from oallama.profile.store import VERSION, profile_to_json, read_profile

FOLDER_VARIABLE = "OALLAMA_CACHE_DIR"


def cache_folder() -> Path:
    """`$OALLAMA_CACHE_DIR`, else the platform's cache folder of the user (`$XDG_CACHE_HOME/oallama` on Linux)."""
    override = os.environ.get(FOLDER_VARIABLE)
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("oallama", appauthor=False))


def profile_path(fingerprint: dict[str, Any], folder: Path | None = None) -> Path:
    """The file for profiles of this machine, device and thread count."""
    return (folder or cache_folder()) / f"profile-v{VERSION}-{fingerprint_key(fingerprint)}.json"


def load(path: Path, warn: Callable[[str], None]) -> Profile | None:
    """The stored profile; None where there is none, or where it is damaged, which is said through `warn`."""
    if not path.exists():
        return None
    try:
        return read_profile(path)
    except ProfileError as error:
        warn(f"the cached profile is ignored and will be measured again: {error}")
        return None


def save(path: Path, profile: Profile) -> None:
    """Replace the stored profile in one step: a reader sees the old file or the new one.

    Raises ProfileError where the folder cannot be written.
    """
    write_json(path, profile_to_json(profile))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """As write_text."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Make a file of the cache, or replace it, in one step. Raises ProfileError where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _not_writable(path.parent, error) from None


@contextlib.contextmanager
def measuring_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the right to measure on this machine; `on_wait` is called once if another process has it.

    The lock ends with the process, however that ends. Raises ProfileError where the folder cannot be written.
    """
    import fcntl  # not on Windows; nothing else here needs it

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "measuring.lock").open("a")
    except OSError as error:
        raise _not_writable(folder, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


def _not_writable(folder: Path, error: OSError) -> ProfileError:
    return ProfileError(
        f"profiles cannot be kept in {folder}: {error.strerror or error}; "
        f"set {FOLDER_VARIABLE} to a folder that you can write"
    )


class Journal:
    """The fragments of a measurement that is under way, one JSON object a line, in the order they were finished."""

    def __init__(self, path: Path) -> None:
        """path: the profile's; the journal lies beside it."""
        self.path = path.with_suffix(".journal")

    def append(self, fragment: dict[str, Any]) -> None:
        """Write one fragment through to the file."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(fragment, allow_nan=False)}\n")  # the line before may be cut off
        except OSError as error:
            raise _not_writable(self.path.parent, error) from None

    def read(self) -> list[dict[str, Any]]:
        """All fragments; a last line cut off by a kill, or anything else that is not a JSON object, is left out."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        fragments = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                fragment = json.loads(line)
                if isinstance(fragment, dict):
                    fragments.append(fragment)
        return fragments

    def clear(self) -> None:
        """Forget it: the measurement is stored, or is to be made afresh."""
        self.path.unlink(missing_ok=True)
