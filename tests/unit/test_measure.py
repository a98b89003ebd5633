"""scripts/measure: what is measured is kept and not measured again, and the committed results give their pictures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from experiments.results import ResultsError  # noqa: E402
from measure import plots  # noqa: E402
from measure.main import main, run  # noqa: E402
from measure.measure import Measure, Step, ratio_text  # noqa: E402
from measure.slices import cuts_of, median_error  # noqa: E402


def trial(runs: list[str]) -> Measure:
    """Two steps, of which the second is interrupted the first time."""

    def measured(name: str) -> float:
        runs.append(name)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return 1.5

    def steps(options: argparse.Namespace) -> Iterator[Step]:
        for name in ("a", "b"):
            yield Step(name, "", lambda name=name: measured(name))  # type: ignore[misc]

    return Measure("a trial", lambda parser: None, steps, ("step", "s"), list)


def test_an_interrupted_measurement_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[str] = []
    options = argparse.Namespace(name="trial", output=tmp_path / "trial.json", rounds=2)
    with pytest.raises(KeyboardInterrupt):
        run(trial(runs), options)
    assert json.loads(options.output.read_text())["steps"]["b"]["state"] == "cut"
    assert run(trial(runs), options) == 0
    assert runs == ["a", "b", "b"], "what is done is not done again"
    assert "| a | 1.5 |\n| b | 1.5 |" in capsys.readouterr().out
    with pytest.raises(ResultsError, match="name another file in -o"):
        run(trial(runs), argparse.Namespace(name="trial", output=options.output, rounds=3))


def test_a_ratio_has_the_interval_of_bench() -> None:
    assert ratio_text([2.0] * 6, [1.0] * 6) == "2.000 (2.000..2.000)"
    assert ratio_text([2.0] * 5, [1.0] * 5) == "too few rounds"


def test_passes_through_the_same_cuts_are_one_row_each() -> None:
    document = json.loads((ROOT / "docs/benchmarks/slices-random.json").read_text())
    cuts = cuts_of(plots.steps_data(document))
    assert len(document["steps"]) == 2 * len(cuts) == 40
    assert [round(median_error(cuts, phase), 3) for phase in ("prompt", "decode")] == [0.054, 0.11]


@pytest.mark.parametrize(
    ("what", "file"),
    [("placements", "predict"), ("slices", "slices-random"), ("streams", "slices-streams"), ("scheinfer", "scheinfer")],
)
def test_committed_results_give_their_pictures(what: str, file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert main(["plot", what, str(ROOT / "docs" / "benchmarks" / f"{file}.json"), "-o", str(tmp_path)]) == 0
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made and all((ROOT / "docs" / "pictures" / name).is_file() for name in made)


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logits", str(tmp_path / "no.gguf"), "-o", str(tmp_path / "o.json")]) == 2
    assert capsys.readouterr().err.startswith("measure: ")
