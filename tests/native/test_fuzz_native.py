"""The native code under gcc's or clang's sanitizers, with the real ggml: native_test.cpp, emulated_test.cpp, and a
bounded share of the fuzz targets, by libFuzzer where $CXX is clang."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_helpers import build_native, run_native
from seeds import SEEDS

import ggml_bridge

# building, and machines that are busy with something else
pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]

RUNS = 10_000
GOLDEN = Path(__file__).parents[1] / "golden" / "fuzz-native"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "ASAN_OPTIONS": "allocator_may_return_null=1",
    }
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=1100, env=environment)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("target", ["native_test", "emulated_test"])
def test_native_code_is_clean(bridge: ggml_bridge.Bridge, target: str, sanitizers: str) -> None:
    program = build_native(target, bridge.libraries.folder, sanitizers)
    run_native([program], OMP_NUM_THREADS="1")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", ["fuzz_plan", "fuzz_parameters"])
def test_no_input_does_harm(bridge: ggml_bridge.Bridge, target: str, seed: str, tmp_path: Path) -> None:
    program = build_native(target, bridge.libraries.folder, "address,undefined")
    done = run(program, f"-runs={RUNS}", f"-seed={SEEDS[seed]}", f"-artifact_prefix={tmp_path}/")
    assert done.returncode == 0, f"-seed={SEEDS[seed]}: {done.stderr[-8000:]}"
    assert f"Done {RUNS} runs" in done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.txt")), ids=lambda path: path.stem)
def test_a_found_fault_stays_mended(bridge: ggml_bridge.Bridge, path: Path) -> None:
    done = run(build_native(path.parent.name, bridge.libraries.folder, "address,undefined"), str(path))
    assert done.returncode == 0, done.stderr[-8000:]
