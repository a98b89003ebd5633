"""Archives that are unpacked once."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path


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
