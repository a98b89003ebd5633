"""Facts that a native build depends on: the CPU, the C++ compiler, the platform, the usable cores."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oallama.device.cpu import allowed_cpus, most_cpus
from oallama.setup.console import SetupError, capture, compiles

_NO_COMPILER = (
    "no working C++ compiler: install one (Debian and Ubuntu: sudo apt install g++; "
    "Fedora: sudo dnf install gcc-c++) or set CXX"
)
_CPU_FIELDS = (
    *("model name", "vendor_id", "cpu family", "model", "stepping", "flags"),
    *("CPU implementer", "CPU variant", "CPU part", "Features"),
)


@dataclass(frozen=True)
class Cpu:
    """The processor for the compiler's -march=native. `digest` identifies model and feature set."""

    model: str
    features: frozenset[str]
    digest: str

    @property
    def has_amx(self) -> bool:
        return "amx_tile" in self.features


@dataclass(frozen=True)
class Compiler:
    """The C and C++ compilers of one family: `gcc` or `clang`; `version` as in 12.2.0."""

    cc: str
    cxx: str
    family: str
    version: str
    target: str

    def __str__(self) -> str:
        return f"{self.family} {self.version}"


def read_cpu(cpuinfo: str) -> Cpu:
    """Read the CPU from /proc/cpuinfo (its first processor; x86 and aarch64 name the fields differently)."""
    fields: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _CPU_FIELDS:
            fields[name.strip()] = value.strip()
    features = frozenset((fields.pop("flags", "") + " " + fields.pop("Features", "")).split())
    identity = repr(sorted(fields.items())) + " ".join(sorted(features))
    model = fields.get("model name") or " ".join(fields.values()) or platform.machine()
    return Cpu(model, features, hashlib.sha256(identity.encode()).hexdigest()[:16])


def this_cpu() -> Cpu:
    return read_cpu(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))


def find_compiler(env: Mapping[str, str]) -> Compiler:
    """Return CXX and CC if set, else the first of c++, g++, clang++ and the C compiler of the same family.

    Raises SetupError if the compiler is missing or does not identify itself.
    """
    wish = env.get("CXX")
    names = [wish] if wish else ["c++", "g++", "clang++"]
    cxx = next((program for name in names if (program := _which(name, env))), "")
    if not cxx:
        raise SetupError(f"CXX={wish} is not a program: give a C++ compiler" if wish else _NO_COMPILER)
    sibling = re.sub(r"(clang|g|c)\+\+", lambda match: {"g": "gcc", "c": "cc"}.get(match[1], match[1]), Path(cxx).name)
    cc = _which(env.get("CC") or str(Path(cxx).parent / sibling), env) or _which("cc", env)
    banner = capture([cxx, "--version"], env)
    if cc is None or not banner:
        raise SetupError(_NO_COMPILER)
    first = banner.splitlines()[0]
    version = re.search(r"\d+(?:\.\d+)+", re.sub(r"\(.*?\)", "", first))
    family = "clang" if "clang" in banner else "gcc" if "Free Software Foundation" in banner else Path(cxx).name
    target = (capture([cxx, "-dumpmachine"], env) or "").strip()
    return Compiler(cc, cxx, family, version[0] if version else first, target)


def check_compiler(compiler: Compiler, env: Mapping[str, str]) -> None:
    """Compile and link a small program. Raises SetupError if it fails (missing headers)."""
    program = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"
    if not compiles([compiler.cxx, "-std=c++17"], program, env, ["-o", "check"]):
        raise SetupError(f"{compiler.cxx} cannot compile a small program; {_NO_COMPILER}")


def platform_tag() -> str:
    """Return operating system, architecture and C library of a native wheel: `linux-x86_64-glibc2.36`."""
    return f"{sysconfig.get_platform()}-{''.join(platform.libc_ver())}".rstrip("-")


def check_own(folder: Path) -> None:
    """Raise SetupError if another user could have written a folder of the cache, whose contents run as this user."""
    parent = folder.parent.resolve()  # it may be a link, e.g. to another disk
    for path in (parent, folder, *(path for path in folder.rglob("*") if not path.is_symlink())):
        status = path.lstat()
        others = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
        if status.st_uid not in (0, os.getuid()) or status.st_mode & others:
            raise SetupError(f"other users can write to {path}: change its permissions, or remove it and run again")


def build_jobs(env: Mapping[str, str]) -> int:
    """Return how many compilers to run at once: CMAKE_BUILD_PARALLEL_LEVEL, else the usable cores, at most one per GB
    of free memory."""
    if (n_wished := env.get("CMAKE_BUILD_PARALLEL_LEVEL", "")).isdecimal():
        return max(1, int(n_wished))
    cores = min(len(allowed_cpus()), most_cpus(Path("/")))
    if free := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8")):
        cores = min(cores, max(1, int(free[1]) * 1024 // 10**9))
    return int(cores)


def _which(name: str, env: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=env.get("PATH"))
