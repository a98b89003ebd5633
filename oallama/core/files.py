"""Files that are only ever replaced whole, the error for one that cannot be written, locks of files, TOML, and the
cache's folder."""

from __future__ import annotations

import errno
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
    """Folder of what can be made again: `$OALLAMA_CACHE_DIR`, in which `~` is the user's home, else `oallama` in
    `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := env.get(FOLDER_VARIABLE):
        return user_path(own)
    xdg = Path(env.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "oallama"
    return Path(env.get("HOME") or user_path("~"), ".cache", "oallama")


def user_path(text: str) -> Path:
    """A path in which `~` is the user's home; it stays where nobody has that name, or no home is known."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for these


def read_text(path: str | Path) -> str:
    """The text of a file, or of a pipe, that somebody else may have made. Raises OSError, also where it is longer than
    MOST_TEXT characters, and UnicodeDecodeError."""
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def owner_only(path: str, flags: int) -> int:
    """An opener for open() whose file, where it is made, only its user can read."""
    return os.open(path, flags, OWNER_ONLY)


def write_whole(path: Path, content: str | bytes, private: bool = False) -> None:
    """Make or replace a file in one step: a reader sees the old file or the new one, which has the old one's mode;
    private: which only its user can read. A link goes on to point there. Raises OSError."""
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
    """Open a file for lock_file, which another user cannot open, as whoever has it open can lock it. Raises OSError."""
    return open(path, "a+", encoding="utf-8", opener=owner_only)


def lock_file(file: IO[Any], taken: Callable[[], None]) -> None:
    """Lock an open file until it is closed, at the latest with the process. taken: called once where another process
    has it, which is then waited for, unless the call raises."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        taken()
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
    """The error of that kind for a result that cannot be written. Its exit code is 1 where the disk is full or broken,
    which is no fault of the path."""
    made = kind(f"cannot write {what}: {error.strerror or error}")
    if error.errno in DISK_FAILED:
        made.exit_code = 1
    return made
