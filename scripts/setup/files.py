"""Files of a build: written whole, unpacked once, whose they are, and room for them on the disk."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import SetupError


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
    draft.replace(path)


def extract(archive: Path, folder: Path) -> None:
    """Unpack a tar archive, which cannot write outside the folder."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in the first releases of Python 3.10
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)


def once(mark: Path, text: str, work: Callable[[], None]) -> None:
    """Do some work unless the file `mark` says that it was done from the same `text`."""
    if mark.is_file() and mark.read_text(encoding="utf-8") == text:
        return
    work()
    mark.write_text(text, encoding="utf-8")


def stamp_of(archive: Path) -> str:
    """Tells an archive from another of its name."""
    status = archive.stat()
    return f"{status.st_size} {int(status.st_mtime)}\n"


def is_own(status: os.stat_result, user: int) -> bool:
    """Whether a file or folder belongs to this user or root, and nobody else may write to it."""
    others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
    return status.st_uid in (0, user) and not status.st_mode & others


def need_space(folder: Path, n_bytes: int, shown: Path) -> None:
    """Raises SetupError where the disk of `folder` has less room than a build takes."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise SetupError(
            f"the build needs {n_bytes / 1e9:.0f} GB in {shown} and {free / 1e9:.1f} GB are free: "
            "free some, or set OALLAMA_CACHE_DIR to a folder on another disk"
        )
