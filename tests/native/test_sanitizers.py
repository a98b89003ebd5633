"""The native code under gcc's or clang's sanitizers, with the real ggml: native_test.cpp, built in seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import ggml_bridge

ROOT = Path(__file__).parents[2]


def build(sanitizers: str, lib_dir: Path) -> Path:
    """Builds native_test in the checkout's build folder, quickly the second time; skips where it cannot be built."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed: the native code was not tested under sanitizers")
    folder = ROOT / "build" / f"native-{sanitizers.partition(',')[0]}"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DOALLAMA_WERROR=ON", "-DOALLAMA_NATIVE_TESTS=ON", f"-DOALLAMA_SANITIZE={sanitizers}"]
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), *generator, *options, f"-DLLAMA_CPP_LIB_DIR={lib_dir}"]
    for command in (configure, [cmake, "--build", str(folder), "--target", "native_test", "--parallel", "2"]):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    return folder / "native_test"


def links(sanitizers: str) -> bool:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return False
    command = [compiler, f"-fsanitize={sanitizers}", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input="int main() {}", text=True, capture_output=True).returncode == 0


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_code_is_clean(bridge: ggml_bridge.Bridge, sanitizers: str) -> None:
    if not links(sanitizers):
        pytest.skip(f"no C++ compiler with -fsanitize={sanitizers}: the native code was not tested under it")
    program = build(sanitizers, bridge.libraries.folder)
    environment = {**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([program], capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, "\n".join(run.stdout.splitlines()[-5:]) + run.stderr[-8000:]
    assert run.stdout.splitlines()[-1] == "0 failed"
