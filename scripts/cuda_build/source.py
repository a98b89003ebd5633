"""The source archive: what is needed to do the same build on the other machine, where programs made here do not run."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from setup.errors import SetupError

from .pack import check_size
from .recipe import is_needed_source

ARCHIVE = "source.tar.xz"


def write_source_archive(source: Path, wheels: Path, out: Path, limit_bytes: int) -> Path:
    """llama.cpp without what CUDA's libraries do not need, llama_cpp's Python part, and the wheels. `source`: the
    unpacked source package. Raises SetupError where it is too large to travel."""
    out.mkdir(parents=True, exist_ok=True)
    llama = source / "vendor" / "llama.cpp"
    draft = out / f"{ARCHIVE}.part"
    with tarfile.open(draft, "w:xz", preset=6) as tar:
        for path in sorted(path for path in llama.rglob("*") if path.is_file()):
            if is_needed_source(path.relative_to(llama)):
                tar.add(path, Path("source", "vendor", "llama.cpp", path.relative_to(llama)))
        for path in sorted((source / "llama_cpp").glob("*.py")):
            tar.add(path, Path("source", "llama_cpp", path.name))
        for path in sorted(wheels.glob("*.whl")):
            tar.add(path, Path("python-wheels", path.name))
    check_size(draft.stat().st_size, limit_bytes, draft)
    return draft.replace(out / ARCHIVE)


def unpack_source_archive(archive: Path, work: Path) -> None:
    """Put an archive's source and wheels into the work folder, in place of what was there, unless they are its very
    ones. Raises SetupError."""
    mark = work / "source" / "archive.txt"
    if not archive.is_file():
        raise SetupError(f"there is no {archive}: make it with scripts/build_cuda --source-archive")
    stamp = f"{archive.stat().st_size} {int(archive.stat().st_mtime)}\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == stamp:
        return
    for name in ("source", "python-wheels"):
        shutil.rmtree(work / name, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(work, filter="data")
        else:
            tar.extractall(work)
    mark.write_text(stamp, encoding="utf-8")
