"""scripts/gpu_run: the steps on a card, their length, and what is kept between calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_card  # noqa: E402
from gpu_card import CardStep, main, run_step, steps_of  # noqa: E402


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With three short steps in place of the real ones; the second fails in the first call."""
    flag = tmp_path / "flag"
    program = (
        f"import pathlib, sys; p = pathlib.Path({str(flag)!r}); known = p.exists(); p.touch(); sys.exit(not known)"
    )
    steps = [
        CardStep("one", "prints JSON", 60, (sys.executable, "-c", "print('[1, 2]')")),
        CardStep("two", "fails once", 60, (sys.executable, "-c", program)),
        CardStep("three", "reads a variable", 60, (sys.executable, "-c", "import os; print(os.environ['CARD'])"),
                 (("CARD", "yes"),)),
    ]  # fmt: skip
    monkeypatch.setattr(gpu_card, "steps_of", lambda device, work: steps)
    return tmp_path / "work"


def test_what_is_done_is_kept_and_what_failed_is_tried_again(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "CUDA0", "--work", str(work), "--list"]) == 0
    assert "about 3 minutes to go" in capsys.readouterr().err and not work.exists()
    assert main(["--device", "CUDA0", "--work", str(work)]) == 1
    found = json.loads((work / "results.json").read_text(encoding="utf-8"))
    assert found["device"] == "CUDA0" and [step["status"] for step in found["steps"].values()] == [0, 1, 0]
    assert found["steps"]["one"]["found"] == [1, 2] and found["steps"]["three"]["found"] == "yes\n"
    assert 'device = "CUDA0"' in (work / "card.toml").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["--device", "CUDA0", "--work", str(work)]) == 0
    told = capsys.readouterr().err
    assert "about 1 minutes to go" in told and "two …" in told and "one …" not in told


def test_results_of_something_else_are_left_alone(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "CUDA0", "--work", str(work), "--only", "one"]) == 0
    assert main(["--device", "CUDA1", "--work", str(work)]) == 2
    assert "is not of CUDA1" in capsys.readouterr().err
    assert main(["--device", "CUDA0", "--work", str(work), "--only", "four"]) == 2
    assert "there is no step four; there are one, two, three" in capsys.readouterr().err
    (work / "results.json").write_text("{", encoding="utf-8")
    assert main(["--device", "CUDA0", "--work", str(work)]) == 2
    assert "no whole JSON document" in capsys.readouterr().err


def test_steps_begin_with_what_decides_most() -> None:
    steps = steps_of("CUDA0", Path("/work"))
    names = ["doctor", "correctness", "pinned", "copies", "zero-copy", "slices", "launch", "launch-no-graphs"]
    assert [step.name for step in steps][: len(names)] == names
    assert steps[-1].name == "speed" and sum(step.seconds for step in steps) < 45 * 60


def test_a_step_that_says_nothing_says_so() -> None:
    found = run_step(CardStep("x", "", 1, (sys.executable, "-c", "raise SystemExit(3)")))
    assert (found["status"], found["said"]) == (3, "it said nothing")
