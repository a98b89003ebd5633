"""The self-test of the CPU's layouts, and that it would notice."""

from __future__ import annotations

import pytest

import ggml_bridge
from ggml_bridge import selftest


def test_every_layout_is_right(bridge: ggml_bridge.Bridge) -> None:
    verdicts = selftest.check_layouts()
    assert list(verdicts) == bridge.cpu_layouts()
    assert set(verdicts.values()) == {"ok"}


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
