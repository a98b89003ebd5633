"""Temporary folders that are cleaned up even after programs were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oallama.core.errors import DeviceError


def parent_for_server() -> Path:
    """Parent of llama-server's folder. Raises DeviceError if no folder is writable."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # it has tried to write to each
        raise DeviceError(
            "no writable temporary folder, which llama-server needs for its plan; free some disk space, or set "
            "TMPDIR to another folder"
        ) from None


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """Make a folder for the block, removed at its end, and remove those of this prefix whose programs were killed: each
    is locked by the program that made it for as long as that lives. Raises OSError if none can be made."""
    for path in parent.glob(f"{prefix}*"):
        _remove_abandoned(path)
    while True:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name, _lock(Path(name)):
            folder = Path(name)
            if folder.is_dir():  # else another program took it for abandoned before it was locked
                yield folder
                return


@contextlib.contextmanager
def _lock(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Yield whether the folder is locked. False: another process holds the lock, or it is not a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    with _lock(path, wait=False) as locked, contextlib.suppress(FileNotFoundError):  # another removed it
        if locked and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
