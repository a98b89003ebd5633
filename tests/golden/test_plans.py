"""Plans on recorded profiles are the recorded plans: what changes one must say so (scripts/plan_corpus.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import plan_corpus  # noqa: E402

QUICK = (
    "rpc-worker-1b/",
    "emulated-rtx3060/mixtral-8x7b:Q4_0:4/gpu_weights",
    "emulated-rtx3060/mixtral-8x7b:Q4_0:4/vram_share=0.45/fiddler",
    "emulated-rtx3060/llama3-8b/vram=3GiB/oato/p",
    "emulated-rtx3060/llama3-8b/vram=3GiB/oato/affinity-paper fill-paper",
    *(f"emulated-rtx3060/llama3-8b/vram=3GiB/{policy}" for policy in ("fit", "atsinfer", "flexgen", "hetegen")),
    "emulated-rtx3060/llama-1b/vram_share=0.45/twinpilots",
    "pc+rtx3060-12/gpt-oss-20b:MXFP4:12/vram=3GiB/experts",
    "pc+rtx3060-12/moe-2.7b:Q8_0/vram=2GiB/oato",
    "pc+rtx3060-12/qwen3-30b-a3b:Q4_0:12/vram=4GiB/auto",
    "pc+rtx5090/llama-3.3-70b/vram=40GiB/scheinfer",
)
"""Of every policy and setting something, a few seconds together. The whole corpus: scripts/plan_corpus.py compare."""


def test_plans_on_recorded_profiles_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_corpus.compare(QUICK) == 0, capsys.readouterr().out


def test_every_cell_is_recorded_and_none_takes_more_memory_than_it_may() -> None:
    recorded = json.loads(plan_corpus.PLANS.read_text(encoding="utf-8"))
    keys = [cell.key for cell in plan_corpus.cells()]
    assert sorted(keys) == sorted(recorded)
    for key, plan in recorded.items():
        if "error" in plan:
            continue
        assert plan["spare"] >= 0, key
        used = sum(plan[part] for part in ("weights_gpu", "kv", "compute", "staging"))
        assert used + plan["spare"] == plan["limit"], key


def test_what_the_device_computes_of_long_weights_is_whole_tiles() -> None:
    recorded = json.loads(plan_corpus.PLANS.read_text(encoding="utf-8"))
    assert [key for key, plan in recorded.items() if plan.get("off_step")] == []
