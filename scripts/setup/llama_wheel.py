"""llama-cpp-python, built from source for this CPU, this compiler and these flags, and kept for the next set-up."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .commands import run
from .console import Console, SetupStep
from .environment import requirements_file
from .errors import SetupError
from .files import extract, is_own, need_space, write_json
from .gpu import Backend
from .locked import COMPILED_HERE, LOCK, read_lock
from .machine import Compiler, Cpu, build_jobs, platform_tag

DISK_BYTES = {"cpu": 2 * 10**9}  # free space a build needs; other back ends need more
DISK_BYTES_GPU = 6 * 10**9
CORE_MINUTES = {"cpu": 12, "vulkan": 24, "metal": 14}  # measured on a 2-core machine; CUDA and ROCm below
CORE_MINUTES_GPU = 45


@dataclass(frozen=True)
class Variant:
    """One way to build: the GPU back end, and the CPU layouts (ggml buffer types) that are left in."""

    backend: Backend
    amx: bool = True
    repack: bool = True

    def __str__(self) -> str:
        without = [name for name, kept in (("AMX", self.amx), ("CPU_REPACK", self.repack)) if not kept]
        return self.backend.name + (f" without {' and '.join(without)}" if without else "")


@dataclass(frozen=True)
class Recipe:
    """All that a build needs, and the `key` under which its wheel is kept."""

    version: str
    backend: Backend
    args: tuple[str, ...]
    compiler: Compiler
    key: str

    def build_environment(self, env: Mapping[str, str], work: Path) -> dict[str, str]:
        """The environment for building in `work`. The user's flags are among the arguments."""
        kept = {key: value for key, value in env.items() if key not in ("CFLAGS", "CXXFLAGS")}
        # a repository around the cache is not llama.cpp's
        compilers = {"CC": self.compiler.cc, "CXX": self.compiler.cxx, "GIT_CEILING_DIRECTORIES": str(work)}
        return {**kept, **dict(self.backend.env), **compilers}


def pinned_version(pyproject: str) -> str:
    """The version of llama-cpp-python in the text of pyproject.toml."""
    found = re.search(r"llama-cpp-python==([\w.]+)", pyproject)
    if found is None:
        raise SetupError("pyproject.toml does not pin llama-cpp-python==VERSION: restore that line")
    return found[1]


def cmake_args(variant: Variant, cpu: Cpu, compiler: Compiler, env: Mapping[str, str]) -> tuple[str, ...]:
    """CMake's arguments for a variant; the user's CMAKE_ARGS come last, so that they win.

    GCC drops the stores that fill the AMX tile configuration and the first batched product dies (ggml-org/llama.cpp
    #26954): the two passes that do it are left out. They cost nothing where there is no AMX, but are not needed.
    """
    c_flags, cxx_flags = env.get("CFLAGS", "").split(), env.get("CXXFLAGS", "").split()
    if cpu.has_amx and variant.amx and compiler.family == "gcc":
        cxx_flags += ["-fno-tree-dse", "-fno-dse"]
    if cpu.has_amx and not variant.amx:
        without = ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]
        c_flags, cxx_flags = c_flags + without, cxx_flags + without
    args = ["-DGGML_RPC=ON", *variant.backend.flags]
    args += [f"-DCMAKE_C_FLAGS={' '.join(c_flags)}"] if c_flags else []
    args += [f"-DCMAKE_CXX_FLAGS={' '.join(cxx_flags)}"] if cxx_flags else []
    args += [] if variant.repack else ["-DGGML_CPU_REPACK=OFF"]
    return (*args, *shlex.split(env.get("CMAKE_ARGS", "")))


def wheel_key(version: str, args: tuple[str, ...], cpu: Cpu, compiler: Compiler, tag: str) -> str:
    """Names a wheel by everything its machine code depends on. The wheel is py3-none: Python's version is not in it."""
    identity = [version, *args, cpu.digest, compiler.family, compiler.version, compiler.target, tag]
    return f"{version}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"


def make_recipe(variant: Variant, version: str, cpu: Cpu, compiler: Compiler, env: Mapping[str, str]) -> Recipe:
    """How a variant is built on this machine."""
    args = cmake_args(variant, cpu, compiler, env)
    return Recipe(version, variant.backend, args, compiler, wheel_key(version, args, cpu, compiler, platform_tag()))


class WheelStore:
    """The wheels kept in the cache: `wheels/<key>/*.whl`, each with the self-test's outcome once there is one."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def find(self, key: str) -> Path | None:
        """Raises SetupError where somebody else could have put it there: what is in it runs as this user."""
        wheel = next(iter(sorted((self.cache / "wheels" / key).glob("*.whl"))), None)
        for path in (wheel, wheel.parent) if wheel else ():
            if not is_own(path.stat(), os.getuid()):
                raise SetupError(f"{path} can be changed by other users: remove it, and it is built again")
        return wheel

    def read_outcome(self, key: str) -> dict[str, str]:
        """Layout -> result of the last self-test of this wheel; empty when it has not been tested."""
        try:
            read = json.loads((self.cache / "wheels" / key / "selftest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(layout): str(result) for layout, result in read.items()} if isinstance(read, dict) else {}

    def write_outcome(self, key: str, outcome: Mapping[str, str]) -> None:
        write_json(self.cache / "wheels" / key / "selftest.json", dict(outcome))

    def build(self, console: Console, step: SetupStep, python: Path, recipe: Recipe, env: Mapping[str, str]) -> Path:
        """Build the wheel beside the cache and move it into place whole. The caller holds the cache's lock.

        Source and build folder are kept until there is a wheel, so that a build that was cut short goes on.
        """
        drafts = self.cache / "tmp"
        work = drafts / recipe.key
        for other in drafts.glob("*"):  # of a build that nobody asks for any more: the lock is ours
            if other != work:
                shutil.rmtree(other, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        name = recipe.backend.name
        if not (work / "build").exists():
            need_space(drafts, DISK_BYTES.get(name, DISK_BYTES_GPU), self.cache)
        jobs = build_jobs(env)
        minutes = max(1, round(CORE_MINUTES.get(name, CORE_MINUTES_GPU) / jobs))
        step.announce(f"fetching and compiling llama.cpp, {jobs} jobs: about {minutes} min, only this once")
        source = fetch_source(console, step, recipe.version, work, python, env)
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            build_env = {
                **recipe.build_environment(env, work),
                "CMAKE_ARGS": shlex.join(recipe.args),
                "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
                "SKBUILD_BUILD_DIR": str(work / "build"),
                "TMPDIR": folder,
            }
            # pip's own cache names wheels by version alone, so a wheel for other flags could come out of it.
            pip = [
                str(python),
                "-m",
                "pip",
                "wheel",
                "--verbose",
                "--no-deps",
                "--no-cache-dir",
                "--no-build-isolation",
            ]
            command = [*pip, "--wheel-dir", str(out), str(source)]
            run(console, step, command, build_env, f"building llama.cpp ({name})")
        if not any(out.glob("*.whl")):
            raise SetupError(f"building llama.cpp ({name}) left no wheel: the log has the details")
        note = {"args": recipe.args, "compiler": str(recipe.compiler)}
        (out / "recipe.json").write_text(json.dumps(note, indent=1), encoding="utf-8")
        place = self.cache / "wheels" / recipe.key
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        out.replace(place)
        shutil.rmtree(drafts, ignore_errors=True)
        return next(place.glob("*.whl"))


def fetch_source(
    console: Console, step: SetupStep, version: str, work: Path, python: Path, env: Mapping[str, str]
) -> Path:
    """The source package of llama-cpp-python unpacked in `work`: fetched, unless it is there. Returns its folder."""
    source = work / "source"
    if source.is_dir():
        return source
    draft = work / "sdist"
    shutil.rmtree(draft, ignore_errors=True)
    lock = read_lock(LOCK.read_text(encoding="utf-8"))
    with requirements_file(lock.texts[COMPILED_HERE]) as file:
        pip = [str(python), "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", COMPILED_HERE]
        command = [*pip, "--require-hashes", "--dest", str(draft), "--requirement", str(file)]
        run(console, step, command, env, "fetching the source of llama.cpp")
    package = next(draft.glob("*.tar.gz"), None)
    if package is None:
        raise SetupError(f"the package index gave no source of llama-cpp-python {version}: check PIP_INDEX_URL")
    extract(package, draft / "unpacked")
    next((draft / "unpacked").iterdir()).replace(source)
    shutil.rmtree(draft)
    return source
