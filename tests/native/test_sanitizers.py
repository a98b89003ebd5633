"""The native code under gcc's or clang's sanitizers, with the real ggml: native_test.cpp and emulated_test.cpp."""

from __future__ import annotations

import pytest
from native_helpers import build_native, run_native

import ggml_bridge

# building, and machines that are busy with something else
pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("target", ["native_test", "emulated_test"])
def test_native_code_is_clean(bridge: ggml_bridge.Bridge, target: str, sanitizers: str) -> None:
    program = build_native(target, bridge.libraries.folder, sanitizers)
    run_native([program], OMP_NUM_THREADS="1")
