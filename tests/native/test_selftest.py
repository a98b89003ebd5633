"""The self-test of the CPU's layouts, and that it would notice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import ggml_bridge
from ggml_bridge import selftest


def test_every_layout_is_right(bridge: ggml_bridge.Bridge) -> None:
    verdicts = selftest.check_layouts()
    assert list(verdicts) == bridge.cpu_layouts()
    assert set(verdicts.values()) == {"ok"}


def test_one_layout_as_a_command() -> None:
    command = [sys.executable, "-m", "ggml_bridge.selftest", "--layout", "CPU"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["ok"] and result["layout"] == "CPU"
    assert {"Q4_0", "Q4_K", "F16"} <= {case["type"] for case in result["cases"]}
    assert {case["op"] for case in result["cases"]} == {"MUL_MAT", "MUL_MAT_ID"}


def test_an_unknown_layout_as_a_command() -> None:
    command = [sys.executable, "-m", "ggml_bridge.selftest", "--layout", "FPGA"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stdout == ""
    assert "the CPU has no layout FPGA" in run.stderr


def test_a_wrong_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_QUANTISED_NMSE_LIMIT", 1e-9)  # no 8-bit activation is as exact as that
    monkeypatch.setattr(selftest, "N_TOKENS_AND_THREADS", ((1, 1),))
    result = selftest.test_layout("CPU")
    assert not result["ok"]
    assert "products are wrong, first MUL_MAT " in result["reason"]


def test_a_layout_that_crashes_is_named(monkeypatch: pytest.MonkeyPatch, run_here: object) -> None:
    """The module run per layout is one that dies, as a broken AMX build does."""
    monkeypatch.setattr(selftest, "_MODULE", "crashing_layout")
    verdicts = selftest.check_layouts()
    assert verdicts == {
        "AMX": "the child process crashing_layout died by SIGSEGV (native code touched memory that is not its own):"
        " tile configuration lost",
        "CPU": "ok",
    }
