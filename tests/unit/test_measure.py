"""scripts/measure: what is measured is kept and not measured again, and the committed results give their pictures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from experiments.inputs import InputError  # noqa: E402
from measure import plots  # noqa: E402
from measure.divergence import divergence, log_softmax  # noqa: E402
from measure.main import main, run  # noqa: E402
from measure.measure import Measure, MeasureStep  # noqa: E402
from measure.slices import cuts_of, median_error  # noqa: E402
from measure.slope import pooled_slope, slope  # noqa: E402


def trial(runs: list[str]) -> Measure:
    """Two steps, of which the second is interrupted the first time."""

    def measured(name: str) -> float:
        runs.append(name)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return 1.5

    def steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
        for name in ("a", "b"):
            yield MeasureStep(name, "", lambda name=name: measured(name))  # type: ignore[misc]

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
    with pytest.raises(InputError, match="name another file in -o"):
        run(trial(runs), argparse.Namespace(name="trial", output=options.output, rounds=3))


def test_passes_through_the_same_cuts_are_one_row_each() -> None:
    document = json.loads((ROOT / "docs/benchmarks/slices-random.json").read_text())
    cuts = cuts_of(plots.steps_data(document))
    assert len(document["steps"]) == 2 * len(cuts) == 40
    assert [round(median_error(cuts, phase), 3) for phase in ("prompt", "decode")] == [0.054, 0.11]


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("placements", "predict"),
        ("slices", "slices-random"),
        ("streams", "slices-streams"),
        ("scheinfer", "scheinfer"),
        ("soak-loads", "soak-loads"),
        ("soak-tokens", "soak-tokens"),
    ],
)
def test_committed_results_give_their_pictures(what: str, file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert main(["plot", what, str(ROOT / "docs" / "benchmarks" / f"{file}.json"), "-o", str(tmp_path)]) == 0
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made and all((ROOT / "docs" / "pictures" / name).is_file() for name in made)


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["divergence", str(tmp_path / "no.gguf"), "-o", str(tmp_path / "o.json")]) == 2
    assert capsys.readouterr().err.startswith("measure: ")


def test_a_leak_shows_in_a_slope_and_noise_does_not() -> None:
    x = np.arange(400.0)
    noise = np.random.default_rng(3).normal(0, 5000, 400)
    gradient, half = slope(x, 1e8 + noise)
    assert abs(gradient) < half < 10
    gradient, half = slope(x, 1e8 + 50 * x + noise)
    assert gradient - half < 50 < gradient + half and gradient - half > 0
    assert slope(x, np.full(400, 7.0)) == (0.0, 0.0)


def test_samples_that_follow_their_neighbours_tell_less() -> None:
    """A random walk has no slope, though its least-squares line has one."""
    x, rng = np.arange(300.0), np.random.default_rng(5)
    independent = rng.normal(0, 1, 300)
    walks = [np.cumsum(rng.normal(0, 1, 300)) for _ in range(20)]
    assert slope(x, independent)[1] < 0.01
    covered = sum(abs(gradient) < half for gradient, half in (slope(x, walk) for walk in walks))
    assert covered >= 12


def test_more_processes_narrow_the_interval() -> None:
    x, rng = np.arange(100.0), np.random.default_rng(7)
    series = [(x, 3 * x + rng.normal(0, 10, 100)) for _ in range(4)]
    gradient, half = pooled_slope(series)
    assert abs(gradient - 3) < half < min(slope(*one)[1] for one in series)
    assert pooled_slope([(x, np.full(100, 2.0)), *series])[0] == pytest.approx(9 / 4, abs=1)


def test_divergence_is_kullback_leibler_in_nats() -> None:
    expected = log_softmax(np.log(np.array([[1.0, 3.0], [1.0, 1.0]], np.float32)))
    found = log_softmax(np.log(np.array([[1.0, 1.0], [5.0, 5.0]], np.float32)))
    wanted = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    assert divergence(expected, found) == pytest.approx([wanted, 0.0], abs=1e-7)
