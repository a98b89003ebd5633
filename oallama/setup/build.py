"""Compiles llama.cpp, its libraries and programs, for this CPU, this compiler and these flags.

A build is kept in the cache, `stock/<key>`: `bin`, and recipe.json once it is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggml_bridge.library import LLAMA_CPP_BUILD, LLAMA_CPP_PYTHON_VERSION
from oallama.core.files import cache_folder, write_whole
from oallama.core.temporary import temporary_folder
from oallama.setup.console import Console, SetupError, Step, run
from oallama.setup.gpu import GpuBackend
from oallama.setup.machine import Compiler, Cpu, build_jobs, check_own, platform_tag
from oallama.setup.prebuilt import digest, download, unpack
from oallama.setup.uv import find_uv, package_environment

LOCK = Path(__file__).with_name("locked.txt")
"""llama-cpp-python and the packages that build it, with versions and hashes."""
BINDINGS = "llama-cpp-python"


@dataclass(frozen=True)
class SourcePackage:
    """A source package of the index that contains llama.cpp's sources in `folder`. release: llama.cpp's name for
    them."""

    name: str
    version: str
    sha256: str
    folder: str
    release: str


SOURCE = SourcePackage(
    "xllamacpp", "2026.10.11549", "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b",
    "thirdparty/llama.cpp", f"b{LLAMA_CPP_BUILD}",
)  # fmt: skip
PROGRAMS = ("llama-bench", "llama-server", "llama-cli", "ggml-rpc-server", "test-backend-ops")
CORE_MINUTES = {"cpu": 17, "vulkan": 29}  # on a 2-core machine
CORE_MINUTES_OTHER = 50
RELEASE_FLAGS = (f"-DLLAMA_BUILD_NUMBER={LLAMA_CPP_BUILD}", f"-DLLAMA_BUILD_COMMIT={SOURCE.release}")
"""Build information that the package lacks, unlike a repository."""
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",  # a plugin finds ggml's functions in its library; a static program exports none
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the programs are moved together with their libraries
    "-DLLAMA_BUILD_UI=OFF",  # the server's web page would be made by npm ...
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # ... or downloaded
    "-DLLAMA_OPENSSL=OFF",
    *(f"-DLLAMA_BUILD_{part}=ON" for part in ("COMMON", "TOOLS", "SERVER", "TESTS")),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("EXAMPLES", "APP")),
    *RELEASE_FLAGS,
)


@dataclass(frozen=True)
class Variant:
    """A build: its GPU back end, and which optional CPU layouts (ggml buffer types) it has."""

    backend: GpuBackend
    amx: bool = True
    repack: bool = True

    def __str__(self) -> str:
        without = [name for name, kept in (("AMX", self.amx), ("CPU_REPACK", self.repack)) if not kept]
        return self.backend.name + (f" without {' and '.join(without)}" if without else "")


@dataclass(frozen=True)
class Build:
    """A variant for one machine. place: its folder in the cache, built or not."""

    backend: GpuBackend
    args: tuple[str, ...]
    compiler: Compiler
    place: Path

    @property
    def folder(self) -> Path | None:
        """The folder of its libraries and programs; None until they are built. Raises SetupError if another user could
        have written them: they run as this user."""
        if not (self.place / "recipe.json").is_file():
            return None
        check_own(self.place)
        return self.place / "bin"


def cmake_args(variant: Variant, cpu: Cpu, compiler: Compiler, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return CMake's arguments for a variant; the user's CMAKE_ARGS come last, so that they win.

    GCC drops the stores that fill the AMX tile configuration, and the first batched product crashes (ggml-org/llama.cpp
    #26954), so with AMX two passes of GCC are disabled.
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


def make_build(variant: Variant, cpu: Cpu, compiler: Compiler, cache: Path, env: Mapping[str, str]) -> Build:
    """Return a variant on this machine. Its key covers everything that its machine code depends on."""
    args = (*_FLAGS, *cmake_args(variant, cpu, compiler, env))
    identity = [SOURCE.sha256, *args, *PROGRAMS, cpu.digest, compiler.family, compiler.version, compiler.target]
    key = hashlib.sha256(json.dumps([*identity, platform_tag()]).encode()).hexdigest()[:16]
    return Build(variant.backend, args, compiler, cache / "stock" / f"{SOURCE.release}-{key}")


def compile_build(console: Console, step: Step, build: Build, python: Path, env: Mapping[str, str]) -> None:
    """Download and compile into the cache. The caller holds the cache's lock. Raises SetupError.

    Source and objects stay until the build is complete, so that an interrupted build continues.
    """
    work = build.place.with_name(f"{build.place.name}.part")
    for other in build.place.parent.glob("*"):  # left by an abandoned build, as this process has the lock
        if other != work and not (other / "recipe.json").is_file():
            shutil.rmtree(other, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    name, folder = build.backend.name, work / "build"
    jobs = build_jobs(env)
    minutes = max(1, round(CORE_MINUTES.get(name, CORE_MINUTES_OTHER) / jobs))
    step.announce(f"downloading and compiling llama.cpp, {jobs} jobs: about {minutes} min, once")
    source = download_source(console, step, work, python, env)
    packages = package_environment(env, python)
    tools = work / "tools"
    command = [find_uv(python, env), "pip", "install", "--python", str(python), "--target", str(tools)]
    run(console, step, [*command, "--constraint", str(LOCK), "cmake", "ninja"], packages, "installing cmake")
    variables = {**env, "CC": build.compiler.cc, "CXX": build.compiler.cxx, "PATH": f"{tools / 'bin'}:{env['PATH']}"}
    # no repository around it
    variables.update(build.backend.env, GIT_CEILING_DIRECTORIES=str(work), PYTHONPATH=str(tools))
    for flags in ("CFLAGS", "CXXFLAGS"):  # they are among the arguments
        variables.pop(flags, None)
    cmake_build(console, step, source, folder, build.args, jobs, PROGRAMS, variables, f"llama.cpp ({name})")
    shutil.rmtree(build.place, ignore_errors=True)
    build.place.mkdir()
    (folder / "bin").replace(build.place / "bin")
    note = {"llama_cpp": SOURCE.release, "args": build.args, "compiler": str(build.compiler)}
    write_whole(build.place / "recipe.json", json.dumps(note, indent=1))
    shutil.rmtree(work)


def cmake_build(
    console: Console, step: Step, source: Path, folder: Path, flags: Sequence[str], jobs: int,
    targets: Sequence[str], env: Mapping[str, str], what: str,
) -> None:  # fmt: skip
    """Configure, with ninja if available, and compile; an interrupted build continues. Raises SetupError."""
    cmake = shutil.which("cmake", path=env.get("PATH"))
    if cmake is None:
        raise SetupError(f"no cmake 3.21 or later: run `{sys.executable} -m pip install cmake`")
    command = [cmake, "-S", str(source), "-B", str(folder), *flags]
    if shutil.which("ninja", path=env.get("PATH")) and not (folder / "CMakeCache.txt").exists():
        command += ["-G", "Ninja"]
    run(console, step, command, env, f"configuring {what}")
    command = [cmake, "--build", str(folder), "--parallel", str(jobs), "--target", *targets]
    run(console, step, command, env, f"compiling {what}")


def download_source(console: Console, step: Step, work: Path, python: Path, env: Mapping[str, str]) -> Path:
    """Unpack llama.cpp's sources to `work`/source, unless done before; return that folder. The package stays in the
    cache. Raises SetupError."""
    source = work / "source"
    if not source.is_dir():
        package = f"{SOURCE.name}-{SOURCE.version}"
        kept = cache_folder(env).absolute() / "sources" / f"{package}.tar.gz"
        for folder in (work, kept.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with temporary_folder("new-", work) as draft:
            if not kept.is_file() or digest(kept) != SOURCE.sha256:
                download(_find_source(console, step, draft, python, env), SOURCE.sha256, draft / kept.name, step)
                shutil.move(draft / kept.name, kept)
            unpack(kept, draft / "unpacked", package)
            (draft / "unpacked" / package / SOURCE.folder).replace(source)
    return source


def _find_source(console: Console, step: Step, folder: Path, python: Path, env: Mapping[str, str]) -> str:
    """Return the address of the package in the user's index, from uv, which runs no code of the package."""
    requirements, lock_file = folder / "source.in", folder / "pylock.toml"
    requirements.write_text(f"{SOURCE.name}=={SOURCE.version}\n", encoding="utf-8")
    command = [find_uv(python, env), "pip", "compile", str(requirements), "--no-deps", "--python", str(python)]
    command += ["--format", "pylock.toml", "--output-file", str(lock_file)]
    without = (
        f"the package index has no source of {SOURCE.name} {SOURCE.version} with llama.cpp {SOURCE.release}: "
        "name another index, or a build of llama.cpp with --llama-cpp DIR or --llama-cpp TARBALL"
    )
    try:
        run(console, step, command, package_environment(env, python), "looking for llama.cpp")
    except SetupError as error:
        raise SetupError(without, error.tail) from error
    match = re.search(r'^sdist = \{ (?:url|path) = "([^"]+)"', lock_file.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SetupError(without)
    return match[1] if "://" in match[1] else (lock_file.parent / match[1]).absolute().as_uri()


def install_bindings(python: Path, env: Mapping[str, str]) -> list[str]:
    """Return the command that installs llama-cpp-python without its libraries, which needs no compiler."""
    command = [find_uv(python, env), "pip", "install", "--python", str(python), "--no-deps"]
    command += ["--no-binary", BINDINGS, "--config-settings-package", f"{BINDINGS}:wheel.cmake=false"]
    command += ["--constraint", str(LOCK), "--build-constraint", str(LOCK)]
    return [*command, f"{BINDINGS}=={LLAMA_CPP_PYTHON_VERSION}"]
