"""scripts/reproduce: published figures say where they are from, and the page and picture are what the results give."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from reproduce.figures import FOLDER as PUBLISHED  # noqa: E402
from reproduce.figures import Figure, FigureArm, FigureCell, papers, read_paper  # noqa: E402
from reproduce.main import NUMBERS, PAGE, PICTURE, RESULTS, main, row_of  # noqa: E402
from reproduce.page import CLOSE, DIFFERS, FAILS, RULED_OUT, chart, page, verdict  # noqa: E402
from reproduce.problems import TESTBEDS, machine, needed, run  # noqa: E402
from reproduce.quantities import KINDS, find, least_seconds  # noqa: E402
from reproduce.texts import TEXTS, fails, filled  # noqa: E402
from shared import InputError  # noqa: E402

from oallama.core.files import read_toml  # noqa: E402
from oallama.device.machines import machine_of  # noqa: E402
from oallama.place.decide import POLICIES  # noqa: E402

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


def test_every_figure_can_be_asked_for() -> None:
    for figure in FIGURES:
        assert figure.kind in KINDS, figure.key
        assert figure.published is not None or figure.kind == "not simulated" or figure.why, figure.key
        for arm in (figure.ours, figure.baseline, figure.variant):
            assert arm is None or arm.policy in POLICIES, figure.key


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


def test_parts_of_the_results_in_texts() -> None:
    cells = [
        {"model": "a", "vram_gib": 12.0, "speed_up": 2.0, "baseline": {"ttft_s": 4.0}, "ours": {"ttft_s": 2.0}},
        {"model": "b", "vram_gib": 1.5, "speed_up": 3.0, "baseline": {"ttft_s": 6.0}, "ours": {"device_bytes": 2**31}},
    ]
    plain = {"paper": "p", "assumed": "", "beside": "", "cells": cells, "ours": 3.0, "holds": ["x-1.5.ours > 4"]}
    rows = [{**plain, "id": "x-1.5", "why": "{x-1.5.min.prompt:.1f} of {x-1.5[b 1.5].ours.gib:g} in {x-1.5.max.model}"}]
    assert filled(rows)[0]["why"] == "2.0 of 2 in b"
    assert fails(rows[0], rows) == ["x-1.5.ours > 4"]
    assert fails({**rows[0], "holds": ["x-1.5.ours ~ 3.01", "x-1.5.min.prompt < 2.5"]}, rows) == []
    for path in ("y.ours", "x-1.5.theirs", "x-1.5[c].ours"):
        with pytest.raises(KeyError):
            filled([{**rows[0], "why": "{" + path + "}"}])


def test_what_is_an_input_is_counted_apart(results: dict[str, Any]) -> None:
    echoes = [row["id"] for row in results["figures"] if row["echo"]]
    assert len(echoes) == 16 and {"rate-16", "table1-a-cpu-fp16"} <= set(echoes)
    assert f"Not counted: the {len(echoes)} figures" in page(results)


def test_what_is_far_off_says_why(results: dict[str, Any]) -> None:
    counted = [row for row in results["figures"] if not row["again"]]
    silent = [row["id"] for row in counted if verdict(row) in (DIFFERS, RULED_OUT, FAILS) and not row["why"]]
    assert silent == []


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


def test_more_of_the_card_is_never_slower_in_the_bound() -> None:
    shares = [least_seconds(replace(CELL, gpu_weights=share), "total") for share in (0.25, 0.5, 1.0)]
    assert shares == sorted(shares, reverse=True)


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


def test_verdicts() -> None:
    assert CLOSE == 0.15
    assert verdict(row()) == "within 15 %"
    assert verdict(row(ours=1.0, ratio=1.5)) == "differs"
    assert verdict(row(bound=1.45)) == "beyond the bound"
    assert verdict(row(bound=2.0, lower=True)) == "beyond the bound"
    assert verdict(row(ours=None, ratio=None)) == "no pair"
    assert verdict(row(published=1.0, at_least=True)) == "holds"
    assert verdict(row(published=1.0, ours=0.9, at_least=True)) == "does not hold"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "X"', "citation"),
        ('name = "X"\ncitation = "Y"\n[[figure]]\nid = "a"\nwhat = "b"\nkind = "speed-up"', "no place"),
        ('name = "X"\ncitation = "Y"\n[arms.a]\npolicy = "oato"\nbetter = true', "arms.a has an unknown key better"),
        ('name = "X"\ncitation = "Y"\n[[figure]]\nid = "a"\nplace = "Fig. 1"\nwhat = "b"\nkind = "k"\ncells = "none"',
         "the file has not"),
    ],
)  # fmt: skip
def test_files_that_say_too_little_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_paper(path)


def test_wrong_usage_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "x", "--page"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


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


def test_fewer_threads_are_a_slower_cpu() -> None:
    hosts = [machine(FigureCell("scheinfer-a", "llama2-70b", threads=threads))[0] for threads in (2, 4, 8, 16)]
    assert [host.bytes_per_s for host in hosts] == sorted(host.bytes_per_s for host in hosts)
    with pytest.raises(InputError, match="no machine 'pdp-11'"):
        machine(FigureCell("pdp-11", "llama2-70b"))
