"""scripts/serve_ratio.py: what it makes of its samples. It measures by what bench and serve are tested for."""

import subprocess
import sys
from pathlib import Path

import pytest

from oallama.bench.records import BenchTest, Round, Sample, Series

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import serve_ratio  # noqa: E402


def test_a_ratio_is_of_speeds_by_pairs():
    test = BenchTest(8, 4)
    samples = [(Sample(1.0 + i, 0.4), Sample(2.0 + 2 * i, 0.4)) for i in range(6)]
    rounds = [
        Round(tuple(zip(first, second, strict=True)), 0.0)
        for first, second in zip(samples[::2], samples[1::2], strict=True)
    ]
    measured = Series(test, tuple(rounds))
    prompt = serve_ratio.ratio(measured, lambda sample: sample.prompt_s)
    assert prompt["ratio"] == pytest.approx(0.5) and prompt["n"] == 6 and prompt["ci95"] is not None
    assert serve_ratio.ratio(measured, lambda sample: sample.gen_s)["ratio"] == pytest.approx(1.0)
    few = Series(test, measured.kept[:1])
    assert serve_ratio.ratio(few, lambda sample: sample.prompt_s)["ratio"] == pytest.approx(0.5), "without an interval"
    assert serve_ratio.ratio(Series(test), lambda sample: sample.gen_s)["ratio"] is None, "all were refused"


def test_a_file_that_is_no_model_is_one_sentence(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "serve_ratio.py", tmp_path / "no.gguf", "--device", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
