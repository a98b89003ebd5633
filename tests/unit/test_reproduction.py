"""scripts/reproduce: published figures say where they are from, and the page and picture are what the results give."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from reproduce.figures import FOLDER as PUBLISHED  # noqa: E402
from reproduce.figures import Figure, FigureArm, FigureCell, papers  # noqa: E402
from reproduce.main import NUMBERS, PAGE, PICTURE, RESULTS, row_of  # noqa: E402
from reproduce.page import chart, page  # noqa: E402
from reproduce.problems import TESTBEDS, needed, run  # noqa: E402
from reproduce.quantities import find  # noqa: E402
from reproduce.texts import TEXTS, fails, filled  # noqa: E402

from oallama.core.files import read_toml  # noqa: E402
from oallama.device.machines import machine_of  # noqa: E402

FIGURES = [figure for paper in papers() for figure in paper.figures]
CELL = FigureCell("oato", "llama-mini", "F16", 64, 32, 1024, gpu_weights=0.5)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_every_figure_names_its_paper_and_place() -> None:
    named = {paper.key: paper for paper in papers()}
    assert {"oato", "scheinfer", "hetegen", "twinpilots", "atsinfer", "pipeshard"} <= named.keys()
    for figure in FIGURES:
        assert named[figure.paper].citation
        assert any(word in figure.place.lower() for word in ("fig", "table", "section", "abstract", "row")), figure.key


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


KNOWN_NUMBERS = {
    "scheinfer": "11 12 24 90 128 1024 204.8 32 31.5 15.75 16 4 3 5 10 15 0 6 9 1 8 2 64 7 22 57 1.80",
    "oato": "64 32 512 17.4 20.7 46.2 47.4 50 25 8.8 7 10 1",
    "hetegen": "512 6.5 26.5 24 4.17 317 30 600 11 3.17 3 9 5 90 4",
    "atsinfer": "",
    "pipeshard": "30 8 1 64 6 100",
}
"""Of the papers, and of what was asked: settings, rates of buses, names."""


def test_no_text_has_a_number_of_its_own() -> None:
    """What is simulated stands in a text as a part of the results ({…}), so that it is of today."""
    for path in PUBLISHED.glob("*.toml"):
        known = set(KNOWN_NUMBERS.get(path.stem, "").split())
        for told in read_toml(path).get("told", ()):
            for text in (told.get(key, "") for key in TEXTS):
                plain = re.sub(r"\{[^}]*\}|`[^`]*`|\[[^]]*\]\([^)]*\)|[A-Za-z_][\w./-]*", "", text)
                assert set(re.findall(r"\d+(?:\.\d+)?", plain)) <= known, (path.stem, text)


def test_what_is_an_input_is_counted_apart(results: dict[str, Any]) -> None:
    echoes = [row["id"] for row in results["figures"] if row["echo"]]
    assert len(echoes) == 16 and {"rate-16", "table1-a-cpu-fp16"} <= set(echoes)
    assert f"Not counted: the {len(echoes)} figures" in page(results)


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


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "published": 1.5,
        "ours": 1.4,
        "bound": None,
        "lower": False,
        "at_least": False,
        "unit": "×",
        "again": False,
    }
    return {**plain, "ratio": 1.5 / 1.4, **changes}


def test_testbeds_are_plausible_and_every_figure_has_a_source() -> None:
    found = [machine_of(str(path)) for path in sorted(TESTBEDS.glob("*.json"))]
    assert {on.name for on in found} == {path.stem for path in TESTBEDS.glob("*.json")} >= {"oato", "scheinfer-a"}
    for on in found:
        assert 20e9 < on.host.bytes_per_s < 200e9 < on.card.bytes_per_s < 1.1e12
        assert 0.3e12 < on.host.flops_per_s < 4e12 < on.card.flops_per_s
        assert on.card.pageable_bytes_per_s < on.card.pinned_bytes_per_s <= 31.5e9
        figures = " ".join(figure for figure, _ in on.sources)
        assert "CPU" in figures and "GPU" in figures and "link" in figures
        assert all(len(source) > 20 for _, source in on.sources)
