"""The native code under gcc's or clang's sanitizers, with the real ggml: native_test.cpp and emulated_test.cpp."""

from __future__ import annotations

import os
import subprocess

import pytest
from native_helpers import build_native

import ggml_bridge

pytestmark = pytest.mark.timeout(1200)  # building, and machines that are busy with something else


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("target", ["native_test", "emulated_test"])
def test_native_code_is_clean(bridge: ggml_bridge.Bridge, target: str, sanitizers: str) -> None:
    program = build_native(target, bridge.libraries.folder, sanitizers)
    environment = {**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([program], capture_output=True, text=True, timeout=1100, env=environment)
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert run.returncode == 0, "\n".join(failed[:40]) + run.stderr[-8000:]
    assert run.stdout.splitlines()[-1] == "0 failed"
