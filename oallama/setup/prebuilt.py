"""Checks a prebuilt llama.cpp, a folder, an archive or an address, and makes a folder of libraries from it."""

from __future__ import annotations

import hashlib
import http.client
import lzma
import os
import platform
import shutil
import tarfile
import urllib.request
import zlib
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.core.files import DISK_FAILED
from oallama.core.temporary import temporary_folder
from oallama.setup.console import SetupError, Step
from oallama.setup.machine import check_own

_MACHINES = {62: "x86_64", 183: "aarch64", 40: "armv7l", 243: "riscv64"}
"""ELF machine numbers."""
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20


def take(source: str, sha256: str | None, cache: Path, step: Step) -> Path:
    """Return the folder of libraries of --llama-cpp; unpacks archives in the cache. Raises SetupError, UsageError."""
    wanted = sha256.lower().removeprefix("sha256:") if sha256 else None
    if wanted is not None and (len(wanted) != 64 or set(wanted) - set("0123456789abcdef")):
        raise UsageError(f"--sha256 must be the 64 hexadecimal digits of the archive's SHA-256, not {sha256}")
    if source.startswith(("http://", "https://")):
        if wanted is None:
            raise UsageError("an archive from the network needs its hash; give --sha256")
        folder = _unpacked(source, wanted, cache, step)
    elif Path(source).is_dir():
        if wanted is not None:
            raise UsageError(f"{source} is a folder, which has no hash; omit --sha256")
        folder = Path(source).absolute()
    elif Path(source).is_file():
        hash_ = digest(Path(source))
        if wanted not in (None, hash_):
            raise SetupError(f"{source} has the SHA-256 {hash_}, not {wanted}: it is another file, or was modified")
        folder = _unpacked(source, hash_, cache, step)
    else:
        raise UsageError(f"--llama-cpp must be a folder, an archive (.tar.gz) or its address, not {source}")
    return _libraries(folder, source)


def check_machine(folder: Path) -> None:
    """Raise SetupError unless the libraries are for this processor. Their interface is checked by loading them."""
    header = (folder / "libggml-base.so.0").open("rb").read(20)
    machine = _MACHINES.get(int.from_bytes(header[18:20], "little"), "another processor")
    if header[:4] != b"\x7fELF" or machine != platform.machine():
        raise SetupError(f"the libraries in {folder} are for {machine}, but this machine is {platform.machine()}")


def _libraries(folder: Path, source: str) -> Path:
    """Return the folder with llama.cpp's libraries, at most three levels below."""
    for pattern in ("libllama.so", "*/libllama.so", "*/*/libllama.so", "*/*/*/libllama.so"):
        for library in sorted(folder.glob(pattern)):
            names = ("libllama.so.0", "libggml.so.0", "libggml-base.so.0", "libmtmd.so")
            lacks = [name for name in names if not (library.parent / name).is_file()]
            if lacks:
                raise SetupError(f"{library.parent} has no {lacks[0]}: give a complete build of llama.cpp for Linux")
            return library.parent
    raise SetupError(f"no libllama.so in {source}: give a build of llama.cpp for Linux with shared libraries")


def _unpacked(given: str, sha256: str, cache: Path, step: Step) -> Path:
    """Return the cache folder for an archive of this hash. Raises SetupError if another user could have written it."""
    folder = cache / "llama.cpp" / sha256
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder("new-", folder.parent) as draft:
            download(given, sha256, draft / "archive", step)
            unpack(draft / "archive", draft / "unpacked", given)
            _libraries(draft / "unpacked", given)
            (draft / "unpacked").replace(folder)
    check_own(folder)
    return folder


def download(source: str, sha256: str, archive: Path, step: Step) -> None:
    """Copy a file or download it, and check the copy, which no other user can change."""
    address = Path(source).absolute().as_uri() if Path(source).is_file() else source
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer, archive.open("xb") as file:
            while data := answer.read(_CHUNK):
                file.write(data)
                step.progress(f"{file.tell() >> 20} MiB")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FAILED:
            raise
        raise SetupError(f"cannot download {source} ({error}): check the address, or give a file") from error
    if (hash_ := digest(archive)) != sha256:
        raise SetupError(f"{source} has the SHA-256 {hash_}, not {sha256}: do not trust it")


def unpack(archive: Path, folder: Path, given: str) -> None:
    """Unpack with Python's filter for data, which refuses files and links outside the folder."""
    if not hasattr(tarfile, "data_filter"):
        version = platform.python_version()
        raise SetupError(f"Python {version} cannot unpack {given} safely: use 3.10.12, 3.11.4 or later")
    folder.mkdir()
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FAILED:
            raise
        why = getattr(error, "strerror", None) or str(error).partition(":")[0] or type(error).__name__
        raise SetupError(f"cannot unpack {given} ({why}): it is cut off, or not an archive") from error
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o755)  # whatever the umask


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            total.update(data)
    return total.hexdigest()


def copy_build(folder: Path, copy: Path) -> None:
    """Copy the libraries and programs of a folder to a new one, as hard links if possible."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_symlink() and len(path.readlink().parts) == 1:
            (copy / path.name).symlink_to(path.readlink())
        elif path.is_file():
            try:
                os.link(path.resolve(), copy / path.name)
            except OSError:  # on another disk
                shutil.copy2(path, copy / path.name)
