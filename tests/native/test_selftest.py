"""The self-test of the CPU's layouts, and that it would notice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from layouts import with_amx

import ggml_bridge
from ggml_bridge import selftest
from ggml_bridge.layouts import KINDS, faults_of_kinds

HERE = Path(__file__).parent


def test_every_layout_is_right(bridge: ggml_bridge.Bridge) -> None:
    """All that AMX may get wrong is several matrices at once."""
    results = selftest.check_layouts()
    assert [name for name in results if " " not in name] == bridge.cpu_layouts()
    assert {result for name, result in results.items() if name != "AMX 3-D MUL_MAT"} == {"ok"}


@pytest.mark.timeout(1200)  # building
def test_amx_loses_weights_of_three_dimensions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX's own kernels where this CPU has them."""
    for name, value in with_amx().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setattr(selftest, "_MODULE", "selftest_with_layouts")
    results = selftest.check_layouts()
    assert results["AMX"] == "ok"
    assert list(faults_of_kinds(results)) == ["AMX 3-D MUL_MAT"], results
    assert results["AMX 3-D MUL_MAT"].startswith("3-D MUL_MAT F16: ")


def test_a_wrong_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_QUANTISED_NMSE_LIMIT", 1e-9)  # no 8-bit activation is as exact as that
    monkeypatch.setattr(selftest, "N_TOKENS_AND_THREADS", ((1, 1),))
    for kind in KINDS:
        result = selftest.test_layout("CPU", kind)
        assert not result["ok"]
        assert f"products are wrong, first {kind} " in result["reason"]


def test_a_layout_that_crashes_is_named(monkeypatch: pytest.MonkeyPatch, run_here: object) -> None:
    """The module run per kind is one that dies, as a broken AMX build does, and two kinds of others."""
    monkeypatch.setattr(selftest, "_MODULE", "crashing_layout")
    died = "the child process crashing_layout died by SIGSEGV (native code accessed memory that it does not own):"
    assert selftest.check_layouts() == {
        "AMX": f"{died} tile configuration lost",
        "HALF": "ok",
        "HALF MUL_MAT_ID": f"MUL_MAT_ID Q4_0: {died} tile configuration lost",
        "CPU": f"3-D MUL_MAT Q4_0: {died} tile configuration lost",
    }
