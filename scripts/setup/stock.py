"""The pinned llama.cpp's own programs, built unmodified and kept in the cache: `stock/<key>/bin`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import cmake_build, cmake_configure, run
from .console import Console, SetupStep
from .environment import lock, python_with_pip
from .errors import SetupError
from .files import need_space, write_json
from .gpu import choose_backend
from .llama import working_recipe
from .llama_wheel import Recipe, fetch_source, pinned_version, wheel_key
from .machine import build_jobs, cache_dir, check_compiler, find_compiler, platform_tag, this_cpu
from .main import DONE, asked_backend, clean_environment, guarded

PROGRAMS = ("llama-bench", "llama-server", "llama-cli", "ggml-rpc-server", "test-backend-ops")
CORE_MINUTES = 20  # on a 2-core machine, for the CPU; a GPU back end takes longer
DISK_BYTES = 3 * 10**9
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",  # a plugin finds ggml's functions in its library; a static program exports none
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the programs are moved together with their libraries
    "-DLLAMA_BUILD_UI=OFF",  # the server's web page would be made by npm ...
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # ... or downloaded
    "-DLLAMA_OPENSSL=OFF",
    *(f"-DLLAMA_BUILD_{part}=ON" for part in ("COMMON", "TOOLS", "SERVER", "TESTS")),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("EXAMPLES", "APP")),
)


@dataclass(frozen=True)
class StockBuild:
    """What to build, and where it is (to be) kept: `place/bin` holds programs and libraries once it is complete."""

    recipe: Recipe
    place: Path

    @property
    def programs(self) -> Path | None:
        """The folder of the finished programs; None until they are built."""
        return self.place / "bin" if (self.place / "recipe.json").is_file() else None


def stock_build(root: Path, env: Mapping[str, str], wish: str) -> StockBuild:
    """The build for this machine. `wish` is the back end as in OALLAMA_BACKEND. Raises SetupError, UsageError."""
    cpu, compiler = this_cpu(env), find_compiler(env)
    backend = choose_backend(wish, env, compiler.cxx, env.get("CMAKE_ARGS", ""))
    version = pinned_version((root / "pyproject.toml").read_text(encoding="utf-8"))
    recipe = working_recipe(backend, version, cpu, compiler, env, wish == "auto")
    key = wheel_key(version, (*_FLAGS, *recipe.args, *PROGRAMS), cpu, recipe.compiler, platform_tag())
    return StockBuild(recipe, cache_dir(env) / "stock" / key)


def build_programs(console: Console, build: StockBuild, python: Path, env: Mapping[str, str]) -> Path:
    """Fetch, compile and keep them; returns their folder. Raises SetupError. The caller holds the lock of the cache.
    What an interrupted build compiled is used by the next."""
    work = build.place.with_name(f"{build.place.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "build").exists():
        need_space(work, DISK_BYTES, work.parent)
    with console.step("source", f"fetching llama-cpp-python {build.recipe.version}") as step:
        step.result = _fetch(console, step, build.recipe.version, work, python, env)
    with console.step("programs", "configuring") as step:
        _compile(console, step, build.recipe, work, python, env)
        step.result = f"compiled {', '.join(PROGRAMS)} ({build.recipe.backend.name})"
    return _keep(build, work)


def _fetch(console: Console, step: SetupStep, version: str, work: Path, python: Path, env: Mapping[str, str]) -> str:
    """Put llama.cpp out of the source package into work/llama.cpp. Returns what was done."""
    if (work / "llama.cpp").is_dir():
        return f"kept the source of llama-cpp-python {version}"
    source = fetch_source(console, step, version, work, python, env)
    (source / "vendor" / "llama.cpp").replace(work / "llama.cpp")
    shutil.rmtree(source)
    return f"fetched the source of llama-cpp-python {version}"


def _compile(
    console: Console, step: SetupStep, recipe: Recipe, work: Path, python: Path, env: Mapping[str, str]
) -> None:
    """Configure and build the programs in work/build."""
    jobs = build_jobs(env)
    build_env = recipe.build_environment(env, work)
    cmake, folder = _find_cmake(console, step, work, python, env), work / "build"
    cmake_configure(console, step, cmake, work / "llama.cpp", folder, (*_FLAGS, *recipe.args), build_env, "llama.cpp")
    step.change(f"compiling {len(PROGRAMS)} programs")
    step.announce(f"compiling, {jobs} jobs: about {max(1, round(CORE_MINUTES / jobs))} min, only this once")
    cmake_build(console, step, cmake, folder, jobs, PROGRAMS, build_env, "llama.cpp's programs")


def _find_cmake(console: Console, step: SetupStep, work: Path, python: Path, env: Mapping[str, str]) -> str:
    """The cmake of this machine, or one from the package index, which is what building the wheel uses then."""
    if found := shutil.which("cmake", path=env.get("PATH")):
        return found
    tools = work / "tools"
    cmake = tools / "cmake" / "data" / "bin" / "cmake"
    if not cmake.exists():
        pip = [str(python), "-m", "pip", "install", "--target", str(tools), "--upgrade", "cmake>=3.21"]
        run(console, step, pip, env, "installing cmake")
    return str(cmake)


def _keep(build: StockBuild, work: Path) -> Path:
    """Move programs and libraries into their place, the note that they are complete last; drop everything else."""
    shutil.rmtree(build.place, ignore_errors=True)
    build.place.mkdir()
    (work / "build" / "bin").replace(build.place / "bin")
    note = {"version": build.recipe.version, "args": build.recipe.args, "compiler": str(build.recipe.compiler)}
    write_json(build.place / "recipe.json", note)
    shutil.rmtree(work)
    return build.place / "bin"


def main(root: Path, arguments: Sequence[str]) -> int:
    """The command. Returns its exit status: 0 done, 1 failed or not built, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="stock_binaries", description="Build the pinned llama.cpp's own programs.")
    parser.add_argument("--vulkan", action="store_true", help="with the Vulkan back end (as OALLAMA_BACKEND=vulkan)")
    parser.add_argument("--find", action="store_true", help="build nothing: print where they are, or fail")
    options = parser.parse_args(arguments)
    console = Console(sys.stderr, root / "build" / "stock_binaries.log")
    return guarded(console, "stock_binaries", lambda: _main(root, console, options.vulkan, options.find))


def _main(root: Path, console: Console, vulkan: bool, find: bool) -> int:
    env = clean_environment(os.environ)
    build = stock_build(root, env, "vulkan" if vulkan else asked_backend(env))
    folder = build.programs
    if folder is None and find:
        command = "scripts/stock_binaries" + (" --vulkan" if vulkan else "")
        raise SetupError(f"llama.cpp's programs are not built here: run {command}")
    if folder is None:
        check_compiler(build.recipe.compiler, env)
        with lock(build.place.with_name("stock.lock"), console):
            folder = build.programs  # another process may have built them while we waited
            if folder is None:
                console.open_log()
                console.say(f"llama.cpp {build.recipe.version}, its own programs (log: {console.log_path})")
                folder = build_programs(console, build, python_with_pip(root, env, "llama.cpp"), env)
    print(folder)
    return DONE
