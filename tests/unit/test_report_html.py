"""The html page: self-contained, escaped, and showing what the records say."""

import base64
import hashlib
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import report_records as records
from pages import Page

from oallama.report.html import affinity_html
from oallama.report.layout import (
    BAR_WIDTH,
    affinity_map,
    memory_segments,
    role_order,
    scale_marks,
    weight_segments,
)

REPORTS = pytest.mark.parametrize("make", [records.dense, records.moe, records.hostile])


@REPORTS
def test_nothing_is_loaded_and_nothing_runs_but_our_own(make):
    page = Page(affinity_html(make()))
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
        assert "style" not in attributes
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"url\(|@import|https?://", page.raw["style"])
    assert not re.search(r"fetch|XMLHttp|import\(|eval|innerHTML|https?://", page.raw["script"])
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_hostile_metadata_stays_text():
    text = affinity_html(records.hostile())
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert sum(tag == "style" for tag, _ in page.elements) == 1
    assert "<!--" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "{{7*7}}" in page.text  # shown, not computed
    assert "<script>alert('x')</script>" in page.text


@REPORTS
def test_every_operator_is_marked_once_and_has_its_row(make):
    report = make()
    page = Page(affinity_html(report))
    marks = [a for tag, a in page.elements if tag == "a"]
    rows = [a["id"] for tag, a in page.elements if tag == "tr" and "id" in a]
    assert sorted(a["href"] for a in marks) == sorted(f"#{row}" for row in rows)
    assert len(rows) == len(set(rows)) == len(report.operators)
    on_device = sum(operator.backend == "GPU" for operator in report.operators)
    assert sum("on-G" in a["class"].split() for a in marks) == on_device


def test_the_page_shows_the_numbers_of_the_report():
    report = records.moe()
    text = Page(affinity_html(report)).text
    for wanted in ("412 ms", "31.8 ms", "4.45 s", "Qwen3 30B A3B Instruct", *report.notes, f"{report.memory.kv:,}"):
        assert wanted in text
    for wanted in ("Example CPU 1000", "Example GPU", "2026-11-21", "stock --fit", "all CPU", "1,211 tokens/s"):
        assert wanted in text


def test_where_an_operator_is_comes_first_and_zero_is_on_the_scale():
    report = records.dense()
    some = tuple(replace(row, benefit_s_per_byte=row.affinity - 0.4) for row in report.operators)
    report = replace(report, operators=some)
    page = Page(affinity_html(report))
    assert page.text.count("saved µs") == 2
    tables = affinity_html(report).split("<table")
    for name in ("lines roles", 'id="operators"'):
        head = next(part for part in tables if name in part[:60])
        assert re.search(r"<th[^>]*>([^<]*)</th>", head)[1] == "on"
    zero = [a for tag, a in page.elements if tag == "i" and "zero" in a.get("class", "").split()]
    assert len(zero) == sum(scale_marks(report.operators)) == 1
    assert "would have affinity" in page.text
    none = [replace(row, benefit_s_per_byte=-1.0 - row.affinity) for row in report.operators]
    assert not any(scale_marks(none))
    assert "No operator saves time on the device" in Page(affinity_html(replace(report, operators=tuple(none)))).text


def test_the_same_report_gives_the_same_page():
    assert affinity_html(records.dense()) == affinity_html(records.dense())


def test_a_model_without_operators_and_a_report_without_a_device_still_make_a_page():
    empty = records.report(records.model(n_layer=0), [("output", None, "output", "F16", (8, 8, 1))], capacity=0)
    assert "There is no device" in Page(affinity_html(empty)).text
    assert "no operators" in Page(affinity_html(replace(empty, operators=()))).text


def test_the_map_has_a_cell_for_every_layer_and_role():
    grid = affinity_map(records.moe(n_layer=3).operators)
    assert [row.heading for row in grid.rows] == ["0", "1", "2"]
    assert grid.roles[:4] == ("attn_q", "attn_k", "attn_v", "attn_output")
    assert grid.roles[-3:] == ("ffn_gate", "ffn_up", "ffn_down")
    dense_columns = [bool(cell) for cell in grid.rows[0].cells]
    assert dense_columns == [True] * 4 + [False] * 7 + [True] * 3
    assert [row.heading for row in grid.outside] == ["output"]


def test_unknown_roles_come_last_by_name():
    assert sorted(["zeta", "attn_q", "alpha", "ffn_down"], key=role_order) == ["attn_q", "ffn_down", "alpha", "zeta"]


def test_bars_fill_their_width_and_negative_parts_are_not_drawn():
    memory = records.dense().memory
    segments = memory_segments(memory)
    assert sum(s.width for s in segments) == pytest.approx(BAR_WIDTH, abs=0.1)
    assert sum(s.n_bytes for s in segments) == memory.capacity
    assert all(a.x + a.width == pytest.approx(b.x, abs=0.1) for a, b in pairwise(segments))
    assert sum(s.width for s in weight_segments(300, 1000)) == pytest.approx(BAR_WIDTH, abs=0.1)
    over = memory_segments(replace(memory, spare=-100))
    assert next(s for s in over if s.name == "spare").width == 0


def test_split_operators_are_marked_as_such_and_their_cuts_are_said():
    report = records.sliced()
    page = Page(affinity_html(report))
    split = [a for tag, a in page.elements if tag == "a" and "on-S" in a.get("class", "")]
    assert len(split) == sum(o.backend == "split" for o in report.operators) > 0
    assert all("CPU/copied/card 50/25/25 %" in a["aria-label"] for a in split)
    assert "divided, or copied when needed" in page.text and "a plan of policy scheinfer" in page.text
    assert "split, or streamed" not in Page(affinity_html(records.dense())).text
