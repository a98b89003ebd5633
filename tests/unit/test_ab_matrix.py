"""scripts/ab: the matrix that a TOML describes, and what its report says of the cells."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from ab.cells import Cells, Outcome
from ab.matrix import matrix, read_matrix
from ab.report import comparisons_of, figures_of, html_page, markdown, record, sentences
from click.testing import CliRunner
from experiments.child import Ended
from experiments.comparison import compare_with_stock, figures
from experiments.inputs import InputError
from experiments.models import Shape
from model_shapes import KNOWN

from oallama.cli.bench import command as bench_command
from oallama.cli.profile import command as profile_command

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


def test_a_device_has_options_of_its_own_before_those_of_all() -> None:
    arms = {"arms": ["stock-cpu", "auto"], "without_arms": ["stock-ncmoe"]}
    devices = [{"name": "near", "threads": 1, "refresh_gate": True}, {"name": "pair", "device": "cpu-pair", **arms}]
    _, near, _, pair = matrix(changed(devices=devices, caps=[], workloads=[{"pg": [8, 4]}])).cells
    assert (near.id, near.device, pair.id) == ("near-moe-free-pp8_tg4", "near", "pair-moe-free-pp8_tg4")
    assert " ".join(near.arguments).startswith(
        "--arms stock-fit,auto,stock-ncmoe --device rpc-worker:1 --threads 1 --stock-args -ngl 3 --refresh-gate -p"
    )
    assert " ".join(pair.arguments).startswith("--arms stock-cpu,auto --device cpu-pair --threads 2 ")
    assert (near.profile, pair.profile) == (
        ("--device", "rpc-worker:1", "--threads", "1"), ("--device", "cpu-pair", "--threads", "2"),
    )  # fmt: skip


def test_a_model_has_options_of_its_own_and_a_cap_leaves_arms_out() -> None:
    models = [{"name": "one", "path": "models/x.gguf", "repetitions": 2, "gate": False}]
    caps = [{"gpu_weights": "25%", "without_arms": ["auto"]}, {"gpu_weights": "50%"}]
    of_25, of_50 = matrix(changed(models=models, caps=caps, workloads=[{"pg": [8, 4]}])).cells
    assert " ".join(of_25.arguments) == (
        "--arms stock-fit --device rpc-worker:1 --threads 2 -r 2 --stock-args -ngl 3 --no-gate --gpu-weights 25% "
        "-p 0 -n 0 -pg 8,4 -d 0"
    )
    assert of_50.arguments[1] == "stock-fit,auto"


@pytest.mark.parametrize(
    ("at_once", "groups"),
    [
        (6, ["stock-fit,a,b,c,d,e"]),
        (5, ["stock-fit,a,b,c", "stock-fit,d,e"]),
        (3, ["stock-fit,a,b", "stock-fit,c,d", "stock-fit,e"]),
        (2, ["stock-fit,a", "stock-fit,b", "stock-fit,c", "stock-fit,d", "stock-fit,e"]),
    ],
)
def test_the_first_arm_is_compared_with_every_other(at_once: int, groups: list[str]) -> None:
    options = {"arms": ["stock-fit", *"abcde"], "device": "rpc-worker:1", "at_once": at_once}
    models = [{"name": "one", "path": "models/x.gguf"}]
    cells = matrix(changed(options=options, models=models, caps=[], workloads=[{"pg": [8, 4]}])).cells
    assert [cell.arguments[1] for cell in cells] == groups
    numbers = [""] if len(groups) == 1 else [f"-{n}" for n in range(1, len(groups) + 1)]
    assert [cell.id for cell in cells] == [f"one-free-pp8_tg4{number}" for number in numbers]


def test_only_a_cell_with_oato_is_told_how_it_places() -> None:
    options = {"arms": ["stock-fit", "oato", "auto"], "device": "rpc-worker:1", "at_once": 2, "fill": "full"}
    models = [{"name": "one", "path": "models/x.gguf"}]
    cells = matrix(changed(options=options, models=models, caps=[], workloads=[{"pg": [8, 4]}])).cells
    assert [(cell.arguments[1], "--fill" in cell.arguments) for cell in cells] == [
        ("stock-fit,oato", True),
        ("stock-fit,auto", False),
    ]


def test_without_a_device_there_is_nothing_to_profile() -> None:
    options = {"arms": ["stock-cpu", "cpu"], "device": "none"}
    assert {cell.profile for cell in matrix(changed(options=options)).cells} == {()}


def test_without_caps_what_is_free_is_used() -> None:
    assert {cell.cap for cell in matrix(changed(caps=[])).cells} == {"free"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "two words"}, "name must be"),
        ({"speed": 1}, "unknown key speed"),
        ({"options": {"arms": ["a", "b"], "at_once": 1}}, "at_once must be at least 2"),
        ({"models": []}, r"at least one \[\[models\]\]"),
        ({"models": [{"name": "a"}]}, "either path or like"),
        ({"models": [{"name": "a", "path": "x"}, {"name": "a", "path": "y"}]}, "same name"),
        ({"workloads": [{"pg": [64]}]}, "a workload: pg must be"),
        ({"workloads": [{"pg": [0, 4]}]}, "a workload: pg must be"),
        ({"caps": [{"ram": "1GiB"}]}, "unknown key ram"),
        ({"options": {"arms": []}}, "at least one arm"),
        ({"options": {"arms": ["auto"], "threads": "2"}}, "threads has the wrong type"),
        ({"options": {"arms": ["auto"], "refresh_gate": 1}}, "refresh_gate has the wrong type"),
        ({"devices": [{"device": "cpu-pair"}]}, "a device needs a name"),
        ({"devices": [{"name": "a"}, {"name": "a"}]}, "two devices have the same name"),
        ({"devices": [{"name": "a", "speed": 2}]}, "unknown key speed"),
        ({"devices": []}, r"at least one \[\[devices\]\]"),
    ],
)
def test_what_is_no_matrix_is_refused_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        matrix(changed(**changes))


def test_a_file_that_is_no_toml_or_missing_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("name = ")
    for path in (bad, tmp_path / "none.toml"):
        with pytest.raises(InputError, match=re.escape(str(path))):
            read_matrix(path)


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "ab").glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_matrices_are_commands_that_oallama_bench_takes(path: Path, tmp_path: Path) -> None:
    made = read_matrix(path)
    assert made.name == path.stem
    for cell in made.cells:
        file = cell.model.file
        assert file.like in KNOWN if isinstance(file, Shape) else file == "models/oallama-stories-q4_0.gguf"
        arguments = [str(tmp_path / "missing.gguf"), *cell.arguments, "-o", str(tmp_path / "rows.json")]
        outcome = CliRunner().invoke(bench_command, arguments)
        assert "missing.gguf" in str(outcome.exception)  # everything before the model was understood
        outcome = CliRunner().invoke(profile_command, [str(tmp_path / "missing.gguf"), *cell.profile])
        assert "missing.gguf" in str(outcome.exception)


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
        "gate": None,
        **changes,
    }


PLACE = ("rpc-worker:1", "m", "25%", "pp64+tg32")


def compared(*rows: dict[str, Any]) -> list[Any]:
    return compare_with_stock(PLACE, rows, "total")


def test_the_best_stock_arm_is_what_counts() -> None:
    (auto,) = compared(row("stock-fit", 2.0), row("stock-cpu", 1.0), row("auto", 0.8))
    assert (auto.arm, auto.stock) == ("auto", "stock-cpu")
    assert auto.value == pytest.approx(1.25, rel=1e-6)
    assert auto.low <= auto.value <= auto.high


def test_a_stock_arm_that_is_not_what_it_says_is_no_opponent() -> None:
    (auto,) = compared(row("stock-fit", 2.0), row("stock-cpu", 1.0, problems=["a fraud"]), row("auto", 1.0))
    assert auto.stock == "stock-fit"
    assert compared(row("auto", 1.0)) == []


def test_the_same_configuration_is_as_fast_whatever_the_samples_say() -> None:
    (auto,) = compared(row("stock-cpu", 1.0), row("auto", 1.1, same_as="stock-cpu"))
    assert (auto.value, auto.same) == (1.0, True)
    assert auto.noise == pytest.approx(1 / 1.1)
    (twin,) = compared(row("auto", 1.1), row("stock-cpu", 1.0, same_as="auto"))
    assert twin.same
    (other,) = compared(row("stock-cpu", 1.0), row("auto", 1.1))
    assert other.noise is None


def test_an_arm_that_is_not_what_it_says_has_no_number() -> None:
    (auto,) = compared(row("stock-cpu", 1.0), row("auto", 0.5, problems=["half is missing"]))
    assert (auto.value, auto.refused) == (None, "half is missing")


def test_the_no_harm_figure_is_the_worst_cell() -> None:
    found = [
        *compared(row("stock-cpu", 1.0), row("auto", 0.5)),
        *compared(row("stock-cpu", 1.0), row("auto", 1.25)),
        *compared(row("stock-cpu", 1.0), row("auto", 1.0, problems=["x"])),
    ]
    (made,) = figures(found)
    assert (made.worst.value, made.best.value) == (pytest.approx(0.8), pytest.approx(2.0))
    assert made.mean == pytest.approx((0.8 * 2.0) ** 0.5)
    assert (made.n_cells, made.n_harmed, made.n_same) == (2, 1, 0)


def test_a_cell_below_is_told_from_one_that_noise_may_explain() -> None:
    wild = {"samples_ns": [round(s * 1e9) for s in (0.8, 1.3, 1.0, 0.9, 1.2, 1.1)]}
    (made,) = figures([*compared(row("stock-cpu", 1.0), row("auto", 1.05, **wild)),
                       *compared(row("stock-cpu", 1.0), row("auto", 1.25)),
                       *compared(row("stock-cpu", 1.0), row("auto", 1.25, same_as="stock-cpu"))])  # fmt: skip
    assert (made.n_cells, made.n_harmed, made.n_surely, made.n_same) == (3, 2, 1, 1)


@pytest.fixture
def document() -> dict[str, Any]:
    made = matrix(DOCUMENT)
    rows = (
        row("stock-fit", 1.0),
        row("auto", 0.8, predicted={"ttft_s": 0.9, "tpot_s": 0.07}, gate=GATE),
        row("<script>", 2.0, problems=["a | b"]),
    )
    outcomes = [Outcome(made.cells[0], rows, seconds=3.0), Outcome(made.cells[1], error="it <failed>")]
    return record(made, [*outcomes, *(Outcome(cell) for cell in made.cells[2:])], {"CPU": "a CPU", "device": ""})


GATE = {"said": "split 1.25× stock, using it", "winner": "split", "seconds": 12.3, "remembered": False, "trials": []}


def test_what_the_gate_costs_and_how_the_worst_cell_fares_is_said_in_words(document: dict[str, Any]) -> None:
    harm, cost = sentences(document)
    assert harm.startswith("auto, whole run, 1 cells: worst 1.250 (1.")
    assert "(rpc-worker:1, one, 25%, pp64+tg32)" in harm
    assert "geometric mean 1.250; 0 below 0.98; in 0 it is" in harm
    assert cost.startswith("The gate took 12 s in the median cell, 12 to 12 s")
    assert "| rpc-worker:1 | one | 25% | pp64+tg32 | split 1.25× stock, using it | 12.3 |  |" in markdown(document)
    assert "The gate took 12 s" in html_page(document)


def test_arms_that_are_one_configuration_tell_the_noise() -> None:
    made = matrix(DOCUMENT)
    rows = (row("stock-cpu", 1.0), row("auto", 0.95, same_as="stock-cpu"))
    (harm, noise) = sentences(record(made, [Outcome(made.cells[0], rows)], {}))
    assert "worst 1 (same) of the best stock arm" in harm
    assert "in 1 it is that stock arm's very configuration" in harm
    assert noise == "Noise: arms that are one configuration differ by 5.3% in the median cell, 5.3% at most."


def test_the_record_is_json_and_reads_back(document: dict[str, Any]) -> None:
    again = json.loads(json.dumps(document))
    assert comparisons_of(again) == comparisons_of(document)
    assert figures_of(again) == figures_of(document)
    assert not document["complete"]
    assert {p["metric"]: p["predicted_s"] for p in document["predictions"]} == {"ttft": 0.9, "tpot": 0.07}
    assert len(document["cells"]) == 8


def test_markdown_has_every_table(document: dict[str, Any]) -> None:
    text = markdown(document)
    assert "| auto | whole run | 1 | 1.250 |" in text
    assert "| rpc-worker:1 | one | 25% | pp8+tg4 @ d512 | it <failed> |" in text
    assert "a \\| b" in text
    assert "**Not complete:**" in text


def test_the_page_is_whole_and_nothing_in_it_is_code(document: dict[str, Any]) -> None:
    page = html_page(document)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "A &lt;b&gt;trial&lt;/b&gt; &amp; more." in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "default-src 'none'" in page
    assert page.count("<svg ") == 1, "the cells of one model that have a result"


def test_without_anything_measured_there_is_still_a_report() -> None:
    empty = record(matrix(DOCUMENT), [Outcome(cell) for cell in matrix(DOCUMENT).cells], {})
    assert "# trial" in markdown(empty)
    assert "</html>" in html_page(empty)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of `oallama bench`: one row, or a failure where `bad` is among the arguments."""

    def oallama(*arguments: object, limit_s: float | None, log: Path) -> Ended:
        if "bad" in arguments:
            return Ended(1, False, "", "oallama: it is bad", 0.1)
        Path(str(arguments[-1])).write_text('[{"arm": "auto"}]')
        return Ended(0, False, "", "", 0.1)

    monkeypatch.setattr("ab.cells.oallama", oallama)


@pytest.mark.usefixtures("bench")
def test_a_result_of_another_command_or_model_is_not_taken(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    made = matrix(changed(models=[{"name": "m", "path": str(model)}], caps=[], workloads=[{"pg": [8, 4]}]))
    (cell,) = made.cells
    cells = Cells(made, tmp_path / "out", tmp_path)
    assert cells.known(cell) is None
    measured = cells.measure(cell)
    assert (measured.rows, measured.error) == (({"arm": "auto"},), "")
    again = Cells(made, tmp_path / "out", tmp_path, read_only=True)
    assert again.known(cell) == measured
    other = replace(cell, arguments=(*cell.arguments, "--seed", "1"))
    assert again.known(other) is None
    model.write_bytes(b"longer")
    assert again.known(cell) is None


@pytest.mark.usefixtures("bench")
def test_a_cell_that_failed_is_to_be_measured_again(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    options = {"arms": ["bad"], "device": "none"}
    made = matrix(changed(models=[{"name": "m", "path": str(tmp_path / "m.gguf")}], options=options))
    cell = replace(made.cells[0], arguments=("bad",))
    cells = Cells(made, tmp_path / "out", tmp_path)
    assert cells.measure(cell).error == "it is bad"
    assert cells.known(cell) is None


def test_results_of_another_matrix_are_refused(tmp_path: Path) -> None:
    Cells(matrix(DOCUMENT), tmp_path, tmp_path).results.save()
    with pytest.raises(InputError, match="is of matrix trial: name another folder in --out"):
        Cells(matrix(changed(name="other")), tmp_path, tmp_path)
