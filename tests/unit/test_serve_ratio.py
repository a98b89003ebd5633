"""scripts/serve_ratio.py: what it makes of its samples. It measures by what bench and serve are tested for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import serve_ratio  # noqa: E402


def test_a_ratio_is_of_speeds_by_pairs():
    times = {
        "here": [serve_ratio.Times(1.0 + i, 0.1) for i in range(6)],
        "server": [serve_ratio.Times(2.0 + 2 * i, 0.1) for i in range(6)],
    }
    prompt, token = (serve_ratio._ratio(times, what) for what in ("prompt_s", "token_s"))
    assert prompt["ratio"] == pytest.approx(0.5) and prompt["n"] == 6 and prompt["ci95"] is not None
    assert token["ratio"] == pytest.approx(1.0)
    few = {way: found[:2] for way, found in times.items()}
    assert serve_ratio._ratio(few, "prompt_s")["ratio"] == pytest.approx(0.5), "without an interval"
    assert serve_ratio._ratio({"here": [], "server": []}, "token_s")["ratio"] is None, "all were refused"


def test_a_file_that_is_no_model_is_one_sentence(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "serve_ratio.py", tmp_path / "no.gguf", "--device", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
