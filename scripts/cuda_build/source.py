"""The source archive: what is needed to do the same build on the other machine, where programs made here do not run."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from oallama.setup.console import SetupError

from .files import extract, once, stamp_of
from .pack import check_size
from .recipe import is_needed_source

ARCHIVE = "source.tar.xz"


FOLDERS = ("source", "bindings", "python-wheels")
"""Of the work folder: llama.cpp, llama_cpp's Python part, and the wheels that its Python needs."""


def write_source_archive(work: Path, out: Path, limit_bytes: int) -> Path:
    """Pack FOLDERS of the work folder, without what CUDA's libraries do not need. Raises SetupError for an archive that
    is too large to travel."""
    out.mkdir(parents=True, exist_ok=True)
    source = work / FOLDERS[0]
    draft = out / f"{ARCHIVE}.part"
    with tarfile.open(draft, "w:xz", preset=6) as tar:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            if is_needed_source(path.relative_to(source)):
                tar.add(path, path.relative_to(work))
        for name in FOLDERS[1:]:
            for path in sorted((work / name).iterdir()):
                tar.add(path, path.relative_to(work))
    check_size(draft.stat().st_size, limit_bytes, draft)
    return draft.replace(out / ARCHIVE)


def unpack_source_archive(archive: Path, work: Path) -> None:
    """Put an archive's source and wheels into the work folder, in place of what was there, unless they are its very
    ones. Raises SetupError."""
    mark = work / "source" / "archive.txt"
    if not archive.is_file():
        raise SetupError(f"no {archive}: make it with scripts/build_cuda --source-archive")

    def replace() -> None:
        for name in FOLDERS:
            shutil.rmtree(work / name, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        extract(archive, work)

    once(mark, stamp_of(archive), replace)
