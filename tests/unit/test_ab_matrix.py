"""scripts/ab: the matrix that a TOML describes, and what its report says of the cells."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from ab.cells import Outcome, Store
from ab.matrix import Cell, Matrix, MatrixError, matrix, read_matrix
from ab.plots import plots
from ab.report import against_of, figures_of, html_page, markdown, record
from ab.summary import against_stock, figures
from click.testing import CliRunner
from model_shapes import KNOWN

from oallama.cli.bench import command as bench_command

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = {
    "name": "trial",
    "about": "A <b>trial</b> & more.",
    "options": {"arms": ["stock-fit", "auto"], "device": "rpc-worker:1", "threads": 2, "stock_args": ["-ngl 3"]},
    "models": [
        {"name": "one", "path": "models/x.gguf"},
        {"name": "moe", "like": "moe-1b", "extra_arms": ["stock-ncmoe"]},
    ],
    "caps": [{"gpu_weights": "25%"}, {"vram": "12GiB"}],
    "workloads": [{"pg": [64, 32]}, {"pg": [8, 4], "depth": 512}],
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(DOCUMENT), **changes}


def test_every_combination_is_a_cell_with_its_command() -> None:
    cells = matrix(DOCUMENT).cells
    assert [(cell.model.name, cell.cap, cell.workload) for cell in cells] == [
        (model, cap, workload)
        for model in ("one", "moe")
        for cap in ("25%", "12GiB")
        for workload in ("pp64+tg32", "pp8+tg4 @ d512")
    ]
    assert len({cell.id for cell in cells}) == 8
    assert all(re.fullmatch(r"[\w.-]+", cell.id) for cell in cells)
    assert " ".join(cells[3].arguments) == (
        "--arms stock-fit,auto --device rpc-worker:1 --threads 2 --stock-args -ngl 3 --vram 12GiB "
        "-p 0 -n 0 -pg 8,4 -d 512"
    )
    assert cells[4].arguments[1] == "stock-fit,auto,stock-ncmoe"


def test_without_caps_what_is_free_is_used() -> None:
    assert {cell.cap for cell in matrix(changed(caps=[])).cells} == {"free"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "two words"}, "name must be"),
        ({"speed": 1}, "unknown key speed"),
        ({"models": []}, r"at least one \[\[models\]\]"),
        ({"models": [{"name": "a"}]}, "either path or like"),
        ({"models": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]}, "same name"),
        ({"workloads": [{"pg": [64]}]}, "a workload needs pg"),
        ({"workloads": [{"pg": [0, 4]}]}, "a workload needs pg"),
        ({"caps": [{"ram": "1GiB"}]}, "unknown key ram"),
        ({"options": {"arms": []}}, "at least one arm"),
        ({"options": {"arms": ["auto"], "threads": "2"}}, "threads has the wrong type"),
    ],
)
def test_what_is_no_matrix_is_refused_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(MatrixError, match=says):
        matrix(changed(**changes))


def test_a_file_that_is_no_toml_or_missing_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("name = ")
    for path in (bad, tmp_path / "none.toml"):
        with pytest.raises(MatrixError, match=re.escape(str(path))):
            read_matrix(path)


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "ab").glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_matrices_are_commands_that_oallama_bench_takes(path: Path, tmp_path: Path) -> None:
    made = read_matrix(path)
    assert made.name == path.stem
    for cell in made.cells:
        assert cell.model.path == "models/oallama-stories-q4_0.gguf" or cell.model.like in KNOWN
        arguments = [str(tmp_path / "missing.gguf"), *cell.arguments, "-o", str(tmp_path / "rows.json")]
        outcome = CliRunner().invoke(bench_command, arguments)
        assert "missing.gguf" in str(outcome.exception)  # everything before the model was understood


def row(arm: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """A row of `oallama bench -o json`, as far as the report reads it."""
    samples = [seconds * factor for factor in (1.0, 1.01, 0.99, 1.0, 1.02, 0.98)]
    return {
        "arm": arm,
        "samples_ns": [round(s * 1e9) for s in samples],
        "samples_ttft_s": samples,
        "samples_tpot_s": [s / 10 for s in samples],
        "ttft_s": seconds,
        "tpot_s": seconds / 10,
        "avg_ts": 1 / seconds,
        "device_bytes": 1 << 20,
        "operator_bytes_on_device": 1 << 19,
        "problems": [],
        "same_as": None,
        "predicted": None,
        "notes": ["a note"],
        **changes,
    }


def against(*rows: dict[str, Any]) -> list[Any]:
    return against_stock("m", "25%", "pp64+tg32", rows, "total")


def test_the_best_stock_arm_is_what_counts() -> None:
    (auto,) = against(row("stock-fit", 2.0), row("stock-cpu", 1.0), row("auto", 0.8))
    assert (auto.arm, auto.stock) == ("auto", "stock-cpu")
    assert auto.value == pytest.approx(1.25, rel=1e-6)
    assert auto.low <= auto.value <= auto.high


def test_a_stock_arm_that_is_not_what_it_says_is_no_opponent() -> None:
    (auto,) = against(row("stock-fit", 2.0), row("stock-cpu", 1.0, problems=["a fraud"]), row("auto", 1.0))
    assert auto.stock == "stock-fit"
    assert against(row("auto", 1.0)) == []


def test_the_same_configuration_is_as_fast_whatever_the_samples_say() -> None:
    (auto,) = against(row("stock-cpu", 1.0), row("auto", 1.1, same_as="stock-cpu"))
    assert (auto.value, auto.same) == (1.0, True)
    (twin,) = against(row("auto", 1.1), row("stock-cpu", 1.0, same_as="auto"))
    assert twin.same


def test_an_arm_that_is_not_what_it_says_has_no_number() -> None:
    (auto,) = against(row("stock-cpu", 1.0), row("auto", 0.5, problems=["half is missing"]))
    assert (auto.value, auto.refused) == (None, "half is missing")


def test_the_no_harm_figure_is_the_worst_cell() -> None:
    found = [
        *against(row("stock-cpu", 1.0), row("auto", 0.5)),
        *against(row("stock-cpu", 1.0), row("auto", 1.25)),
        *against(row("stock-cpu", 1.0), row("auto", 1.0, problems=["x"])),
    ]
    (made,) = figures(found)
    assert (made.worst.value, made.best.value) == (pytest.approx(0.8), pytest.approx(2.0))
    assert made.mean == pytest.approx((0.8 * 2.0) ** 0.5)
    assert (made.n_cells, made.n_harmed) == (2, 1)


@pytest.fixture
def document() -> dict[str, Any]:
    made = matrix(DOCUMENT)
    rows = (
        row("stock-fit", 1.0),
        row("auto", 0.8, predicted={"ttft_s": 0.9, "tpot_s": 0.07}),
        row("<script>", 2.0, problems=["a | b"]),
    )
    outcomes = [Outcome(made.cells[0], rows, seconds=3.0), Outcome(made.cells[1], error="it <failed>")]
    return record(made, [*outcomes, *(Outcome(cell) for cell in made.cells[2:])], {"CPU": "a CPU", "device": ""})


def test_the_record_is_json_and_reads_back(document: dict[str, Any]) -> None:
    again = json.loads(json.dumps(document))
    assert against_of(again) == against_of(document)
    assert figures_of(again) == figures_of(document)
    assert not document["complete"]
    assert {p["metric"]: p["predicted_s"] for p in document["predictions"]} == {"ttft": 0.9, "tpot": 0.07}
    assert len(document["cells"]) == 8


def test_markdown_has_every_table(document: dict[str, Any]) -> None:
    text = markdown(document)
    assert "| auto | whole run | 1 | 1.250 |" in text
    assert "| one | 25% | pp8+tg4 @ d512 | it <failed> |" in text
    assert "a \\| b" in text
    assert "**Not complete:**" in text


def test_the_page_is_whole_and_nothing_in_it_is_code(document: dict[str, Any]) -> None:
    page = html_page(document, [('a "picture"', b"<svg/>")])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "A &lt;b&gt;trial&lt;/b&gt; &amp; more." in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "default-src 'none'" in page
    assert 'alt="a &quot;picture&quot;"' in page


def test_the_pictures_show_ratios_times_and_predictions(document: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    made = plots(document)
    assert len(made) == 4
    assert all(svg.lstrip().startswith(b"<?xml") for _, svg in made)


def test_without_anything_measured_there_is_still_a_report() -> None:
    empty = record(matrix(DOCUMENT), [Outcome(cell) for cell in matrix(DOCUMENT).cells], {})
    assert "# trial" in markdown(empty)
    assert "</html>" in html_page(empty, [])


def test_a_result_of_another_command_or_model_is_not_taken(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    (cell,) = matrix(
        changed(models=[{"name": "m", "path": str(model)}], caps=[], workloads=[{"pg": [8, 4]}])
    ).cells  # fmt: skip
    store = Store(tmp_path / "out", tmp_path)
    assert store.known(cell) is None
    (tmp_path / "out" / "cells").mkdir(parents=True)
    store._save(Outcome(cell, (row("auto", 1.0),), seconds=2.0))
    known = store.known(cell)
    assert known is not None
    assert known.rows[0]["arm"] == "auto"
    other = Cell(cell.id, cell.model, cell.cap, cell.workload, (*cell.arguments, "--seed", "1"))
    assert store.known(other) is None
    model.write_bytes(b"longer")
    assert store.known(cell) is None
    assert Matrix("x", "", (cell,)).cells == (cell,)
