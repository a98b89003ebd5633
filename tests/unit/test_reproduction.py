"""scripts/reproduce: page, picture and texts are what the results give, and simulating again gives the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from reproduce.figures import Figure, FigureArm, FigureCell, papers  # noqa: E402
from reproduce.main import NUMBERS, PAGE, PICTURE, RESULTS, row_of  # noqa: E402
from reproduce.page import chart, page  # noqa: E402
from reproduce.problems import needed, run  # noqa: E402
from reproduce.quantities import find  # noqa: E402
from reproduce.texts import fails, filled  # noqa: E402

FIGURES = [figure for paper in papers() for figure in paper.figures]
CELL = FigureCell("oato", "llama-mini", "F16", 64, 32, 1024, gpu_weights=0.5)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_and_the_picture_are_what_the_results_give(results: dict[str, Any]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(results)
    assert PICTURE.read_text(encoding="utf-8") == chart(results)


def test_the_results_have_the_figures_and_texts_of_now(results: dict[str, Any]) -> None:
    rows = {f"{row['paper']}/{row['id']}": row for row in results["figures"]}
    assert list(rows) == [figure.key for figure in FIGURES]
    made = [row_of(figure, {key: rows[figure.key][key] for key in NUMBERS}) for figure in FIGURES]
    assert json.loads(json.dumps(filled(made))) == results["figures"]


def test_every_text_holds_to_the_numbers_that_it_speaks_of(results: dict[str, Any]) -> None:
    rows = results["figures"]
    assert {row["paper"] + "/" + row["id"]: failed for row in rows if (failed := fails(row, rows))} == {}


def test_nothing_simulated_is_beyond_the_bound(results: dict[str, Any]) -> None:
    for row in results["figures"]:
        if row["bound"] is not None and row["ours"] is not None:
            near = row["ours"] / row["bound"]
            assert near >= 1 - 1e-9 if row["lower"] else near <= 1 + 1e-9, row["id"]


def test_simulating_again_gives_the_same() -> None:
    arm = FigureArm("oato", "paper", "paper")
    figure = Figure("a paper", "x", "Fig. 1", "a gain", "speed-up", 1.2, "×", (CELL,), arm, FigureArm("layers"))
    first, second = ({key: run(key) for key in needed([figure])} for _ in range(2))
    assert first == second
    found = find(figure, first)
    base, own = first[CELL, FigureArm("layers")], first[CELL, arm]
    assert base is not None and own is not None
    assert found.ours == pytest.approx(base.total_s / own.total_s)
    assert found.bound is not None and found.bound >= found.ours
