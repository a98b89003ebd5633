"""What the tests of the bridge share: types, and building the native test programs."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[2]


class RunHere(Protocol):
    """run_in_child for a module of this folder."""

    def __call__(self, module: str, request: dict[str, Any], **options: Any) -> dict[str, Any]: ...


def run_native(command: Sequence[str | Path], **environment: str) -> None:
    """Run a native test program; fails with what it said failed, or what a sanitizer did."""
    variables = {**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1", **environment}
    run = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=variables)
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert run.returncode == 0, "\n".join(failed[:40]) + run.stderr[-8000:]
    assert run.stdout.splitlines()[-1] == "0 failed"


@functools.cache
def build_native(target: str, lib_dir: Path, sanitizers: str = "") -> Path:
    """Build a native test program in the checkout's build folder, once in a process. Objects come from ccache where it
    is installed. Processes that build in one folder wait for each other.

    sanitizers: as -fsanitize takes them. Skips where the program cannot be built.
    """
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    cmake = shutil.which("cmake", path=programs)  # set-up's: another one orders flags otherwise, and ccache minds that
    if cmake is None:
        pytest.skip("cmake is not installed: the native code was not tested")
    if not _links(sanitizers):
        pytest.skip(f"no C++ compiler with -fsanitize={sanitizers}: the native code was not tested under it")
    folder = ROOT / "build" / f"native-{sanitizers.partition(',')[0] or 'test'}"
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=programs) else []
    options = ["-DOALLAMA_WERROR=ON", "-DOALLAMA_NATIVE_TESTS=ON", f"-DOALLAMA_SANITIZE={sanitizers}"]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), *generator, *options, f"-DLLAMA_CPP_LIB_DIR={lib_dir}"]
    environment = {
        **os.environ,
        "PATH": programs,
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }  # one cache for all checkouts
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, [cmake, "--build", str(folder), "--target", target, "--parallel", "2"]):
            run = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert run.returncode == 0, run.stdout + run.stderr
    return folder / target


def _links(sanitizers: str) -> bool:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return False
    flags = [f"-fsanitize={sanitizers}"] if sanitizers else []
    command = [compiler, *flags, "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input="int main() {}", text=True, capture_output=True).returncode == 0
