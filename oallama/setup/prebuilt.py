"""A llama.cpp that somebody else built: a folder, an archive or its address becomes a folder of libraries, checked."""

from __future__ import annotations

import hashlib
import http.client
import os
import platform
import shutil
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from ggml_bridge.library import asking_version, wrong_version
from oallama.core.errors import UsageError
from oallama.setup.console import SetupError, Step, capture

_MACHINES = {62: "x86_64", 183: "aarch64", 40: "armv7l", 243: "riscv64"}
"""ELF's numbers of processors."""
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20


def take(given: str, sha256: str | None, cache: Path, step: Step) -> Path:
    """The folder of libraries that --llama-cpp names, archives unpacked in the cache. Raises SetupError, UsageError."""
    wanted = sha256.lower().removeprefix("sha256:") if sha256 else None
    if wanted is not None and (len(wanted) != 64 or set(wanted) - set("0123456789abcdef")):
        raise UsageError(f"--sha256 is {sha256}; give the 64 hexadecimal digits of the archive's SHA-256")
    if given.startswith(("http://", "https://")):
        if wanted is None:
            raise UsageError("an archive from the network needs its hash; give it in --sha256")
        folder = cache / "llama.cpp" / wanted[:16]
        if not folder.is_dir():
            fetched = _download(given, wanted, cache, step)
            try:
                _unpack(fetched, folder, given)
            finally:
                fetched.unlink()
    elif Path(given).is_dir():
        if wanted is not None:
            raise UsageError(f"{given} is a folder, which has no hash; leave out --sha256")
        folder = Path(given).absolute()
    elif Path(given).is_file():
        with Path(given).open("rb") as file:
            found = _digest(file)
        if wanted not in (None, found):
            raise SetupError(f"{given} has the SHA-256 {found}, not {wanted}: it is another file, or was changed")
        folder = cache / "llama.cpp" / found[:16]
        if not folder.is_dir():
            _unpack(Path(given), folder, given)
    else:
        raise UsageError(f"--llama-cpp is {given}; give a folder, an archive (.tar.gz) or the address of one")
    return _libraries(folder, given)


def check(folder: Path, python: Path, env: Mapping[str, str]) -> None:
    """Raises SetupError unless the libraries are for this processor and of our ggml."""
    header = (folder / "libggml-base.so.0").open("rb").read(20)
    machine = _MACHINES.get(int.from_bytes(header[18:20], "little"), "another processor")
    if header[:4] != b"\x7fELF" or machine != platform.machine():
        raise SetupError(f"the libraries in {folder} are for {machine} and this is {platform.machine()}")
    found = capture(asking_version(folder / "libggml-base.so.0", python), env)
    fault = wrong_version(found.strip() if found else None)
    if fault is not None:
        raise SetupError(f"the llama.cpp in {folder} {fault}: take llama.cpp b11312")


def _libraries(folder: Path, given: str) -> Path:
    """The folder, at most three levels below, that has llama.cpp's libraries."""
    for pattern in ("libllama.so", "*/libllama.so", "*/*/libllama.so", "*/*/*/libllama.so"):
        for found in sorted(folder.glob(pattern)):
            names = ("libllama.so.0", "libggml.so.0", "libggml-base.so.0", "libmtmd.so")
            lacks = [name for name in names if not (found.parent / name).is_file()]
            if lacks:
                raise SetupError(f"{found.parent} has no {lacks[0]}: give a whole build of llama.cpp for Linux")
            return found.parent
    raise SetupError(f"there is no libllama.so in {given}: give a build of llama.cpp for Linux with shared libraries")


def _unpack(archive: Path, folder: Path, given: str) -> None:
    """Unpack whole or not at all; nothing lands outside the folder."""
    draft = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):  # not in the first releases of Python 3.10
                tar.extractall(draft, filter="data")
            else:
                tar.extractall(draft)
        draft.replace(folder)
    except (tarfile.TarError, EOFError, ValueError) as error:
        why = str(error).partition(":")[0]
        raise SetupError(f"{given} cannot be unpacked ({why}): it is cut off, or no archive") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _download(url: str, wanted: str, cache: Path, step: Step) -> Path:
    """Fetch an archive into the cache, where it is of the hash that was given."""
    path = cache / "llama.cpp" / f"{wanted[:16]}.part"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer, path.open("wb") as file:
            for n_bytes in _copied(answer, file):
                step.progress(f"{n_bytes >> 20} MiB")
        with path.open("rb") as file:
            found = _digest(file)
    except (OSError, http.client.HTTPException, ValueError) as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == 28:
            raise
        raise SetupError(f"{url} cannot be fetched ({error}): check the address, or give a file") from error
    if found != wanted:
        path.unlink()
        raise SetupError(f"{url} has the SHA-256 {found}, not {wanted}: do not trust it")
    return path


def _copied(source: BinaryIO, target: BinaryIO) -> Iterator[int]:
    total = 0
    while data := source.read(_CHUNK):
        target.write(data)
        total += len(data)
        yield total


def _digest(file: BinaryIO) -> str:
    total = hashlib.sha256()
    while data := file.read(_CHUNK):
        total.update(data)
    return total.hexdigest()


def put(folder: Path, place: Path) -> None:
    """Make `place` the folder of libraries and programs that `folder` is, by links where that can be; what was there
    becomes `place`.old."""
    draft, old = place.with_name(f"{place.name}.new"), place.with_name(f"{place.name}.old")
    for path in (draft, old):
        shutil.rmtree(path, ignore_errors=True)
    draft.mkdir()
    for path in folder.iterdir():
        made = draft / path.name
        if path.is_symlink() and len(path.readlink().parts) == 1:
            made.symlink_to(path.readlink())
        elif path.is_file():
            try:
                os.link(path.resolve(), made)
            except OSError:  # another disk
                shutil.copy2(path, made)
    if place.exists():
        place.replace(old)
    draft.replace(place)
