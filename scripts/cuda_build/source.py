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

    def replace() -> None:
        for name in ("source", "python-wheels"):
            shutil.rmtree(work / name, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        extract(archive, work)

    once(mark, stamp_of(archive), replace)
