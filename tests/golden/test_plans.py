"""Plans on recorded profiles are the recorded plans: what changes one must say so (scripts/plan_corpus.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import plan_corpus  # noqa: E402


@pytest.mark.parametrize("only", ["rpc-worker-1b/", "emulated-rtx3060/mixtral-8x7b/gpu_weights"])
def test_plans_on_recorded_profiles_stay_as_they_are(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_corpus.compare(only) == 0, capsys.readouterr().out
