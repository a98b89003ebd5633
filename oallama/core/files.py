"""Atomic replacement of files, errors for unwritable files, file locks, TOML, and the cache folder."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar

from oallama.core.errors import OallamaError, UsageError

E = TypeVar("E", bound=OallamaError)

DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


OWNER_ONLY = 0o600

FOLDER_VARIABLE = "OALLAMA_CACHE_DIR"

MOST_TEXT = 64 << 20  # far above any profile or description of a machine


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The cache folder: `$OALLAMA_CACHE_DIR`, in which `~` is the user's home, else `oallama` in `$XDG_CACHE_HOME` or
    `~/.cache`."""
    if folder := env.get(FOLDER_VARIABLE):
        return user_path(folder)
    xdg = Path(env.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "oallama"
    return Path(env.get("HOME") or user_path("~"), ".cache", "oallama")


def user_path(text: str) -> Path:
    """A path with `~` expanded; unchanged if the user or the home folder is unknown."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for these


def read_text(path: str | Path) -> str:
    """The text of an untrusted file or pipe. Raises OSError, also for more than MOST_TEXT characters, and
    UnicodeDecodeError."""
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def owner_only(path: str, flags: int) -> int:
    """An opener for open() that creates files readable only by their owner."""
    return os.open(path, flags, OWNER_ONLY)


def write_whole(path: Path, content: str | bytes, private: bool = False) -> None:
    """Create or replace a file atomically: a reader sees the old file or the new file, which has the old file's mode.
    private: only its owner can read it. A symbolic link is followed. Raises OSError."""
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb", opener=owner_only if private else None) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and not private:
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def open_lock(path: Path) -> IO[str]:
    """Open a file for lock_file. Other users cannot open it, as anyone who has it open can lock it. Raises OSError."""
    return open(path, "a+", encoding="utf-8", opener=owner_only)


def lock_file(file: IO[Any], on_wait: Callable[[], None]) -> None:
    """Lock an open file until it is closed or the process ends. on_wait: called once if another process holds the lock;
    then waits for it, unless the call raises."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML document. Raises UsageError."""
    try:
        tomllib = import_module("tomllib")
    except ImportError:
        raise UsageError(f"reading {path} needs Python 3.11 or later") from None
    try:
        return dict(tomllib.loads(read_text(path)))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def unwritten(kind: type[E], what: str, error: OSError) -> E:
    """The error of this type for a result that cannot be written. Its exit code is 1 if the disk is full or broken,
    since the path is then not the cause."""
    fault = kind(f"cannot write {what}: {error.strerror or error}")
    if error.errno in DISK_FAILED:
        fault.exit_code = 1
    return fault
