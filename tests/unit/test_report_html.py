"""What holds for every page: it is self-contained, escapes what it shows, and has each operator once. What pages look
like: tests/golden/report."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import placement_records as placements
import pytest
import report_records as records

from oallama.core.types import Predicted, Workload
from oallama.planner.simulate import Activity, PhaseTimeline, Simulation
from oallama.report.html import affinity_html
from oallama.report.layout import BAR_WIDTH, affinity_map, memory_segments, role_order, weight_segments
from oallama.report.placement_page import page_policy, placement_html, work_times

VOID = {"meta", "input", "br", "img", "link", "hr", "rect"}


class Page(HTMLParser):
    """Collects elements, and the text of script, style and everything else; checks that elements nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.raw, self.open = [], "", {"script": "", "style": ""}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]] += data
        else:
            self.text += data


SERVED = placements.served()
PAGES = {
    "dense": (affinity_html(records.dense()), len(records.dense().operators)),
    "moe": (affinity_html(records.moe()), len(records.moe().operators)),
    "hostile": (affinity_html(records.hostile()), len(records.hostile().operators)),
    "served": (placement_html(SERVED), len(SERVED.operators)),
    "on the CPU": (placement_html(placements.on_cpu(SERVED)), len(SERVED.operators)),
    "hostile, served": (placement_html(placements.hostile()), len(placements.hostile().operators)),
}


@pytest.mark.parametrize(("text", "n_operators"), PAGES.values(), ids=PAGES)
def test_nothing_is_loaded_nothing_runs_but_our_own_and_every_operator_is_there_once(text, n_operators):
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
        assert "style" not in attributes and "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    assert sum(tag in ("script", "style") for tag, _ in page.elements) == 2
    assert not re.search(r"url\(|@import|https?://", page.raw["style"])
    assert not re.search(r"XMLHttp|import\(|eval|innerHTML|https?://", page.raw["script"])
    rows = [attributes["id"] for tag, attributes in page.elements if tag == "tr" and "id" in attributes]
    marks = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(set(rows)) == len(rows) == n_operators
    assert sorted(marks) == sorted(f"#{row}" for row in rows)
    assert "<!--" not in text and "\x1b" not in text and "\u202e" not in text


@pytest.mark.parametrize(("name", "policy"), [("dense", None), ("served", page_policy())])
def test_the_content_security_policy_allows_our_own_style_and_script(name, policy):
    page = Page(PAGES[name][0])
    said = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    allowed = policy or next(said)
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in allowed
    assert allowed.startswith("default-src 'none'") and "unsafe" not in allowed
    assert policy or "fetch" not in page.raw["script"]


@pytest.mark.parametrize("name", ["hostile", "hostile, served"])
def test_hostile_metadata_stays_text(name):
    page = Page(PAGES[name][0])
    assert "{{7*7}}" in page.text  # shown, not computed
    assert "<script>alert('x')</script>" in page.text


def test_the_page_says_where_zero_is_on_the_scale():
    report = records.dense(n_layer=2)
    some = tuple(replace(row, benefit_s_per_byte=row.affinity - 0.4) for row in report.operators)
    assert "Affinity 0.40 would mean" in Page(affinity_html(replace(report, operators=some))).text
    none = tuple(replace(row, benefit_s_per_byte=-1.0 - row.affinity) for row in report.operators)
    assert "No operator saves time on the device" in Page(affinity_html(replace(report, operators=none))).text


def test_the_map_has_a_cell_for_every_layer_and_role():
    grid = affinity_map(records.moe(n_layer=3).operators)
    assert [row.heading for row in grid.rows] == ["0", "1", "2"]
    assert grid.roles[:4] == ("attn_q", "attn_k", "attn_v", "attn_output")
    assert grid.roles[-3:] == ("ffn_gate", "ffn_up", "ffn_down")
    assert [bool(cell) for cell in grid.rows[0].cells] == [True] * 4 + [False] * 7 + [True] * 3
    assert [row.heading for row in grid.outside] == ["output"]
    assert sorted(["zeta", "attn_q", "alpha", "ffn_down"], key=role_order) == ["attn_q", "ffn_down", "alpha", "zeta"]


def test_bars_fill_their_width_and_negative_parts_are_not_drawn():
    memory = records.dense().plan.memory
    segments = memory_segments(memory)
    assert sum(s.width for s in segments) == pytest.approx(BAR_WIDTH, abs=0.1)
    assert sum(s.n_bytes for s in segments) == memory.capacity
    assert all(a.x + a.width == pytest.approx(b.x, abs=0.1) for a, b in pairwise(segments))
    assert sum(s.width for s in weight_segments(300, 1000)) == pytest.approx(BAR_WIDTH, abs=0.1)
    over = memory_segments(replace(memory, spare=-100))
    assert next(s for s in over if s.name == "spare").width == 0


def test_works_are_added_up_by_name_and_stream():
    a, again, b = (
        Activity(stream=stream, kind="operator", name=name, start_s=start_s, end_s=end_s)
        for stream, name, start_s, end_s in (("cpu", "a", 0.0, 1.0), ("cpu", "a", 1.0, 5.0), ("gpu", "b", 1.0, 3.0))
    )
    workload, nothing = Workload(n_prompt=8, n_gen=8, n_ctx=256), Predicted.of(0.0, 0.0, 0)
    course, longer = PhaseTimeline((a, b), 5.0), PhaseTimeline((a, again), 5.0)
    times = work_times(Simulation(workload=workload, predicted=nothing, prompt=longer, token=course))
    assert [(t.name, t.token_s, t.prompt_s) for t in times] == [
        ("a", {"cpu": 1.0}, {"cpu": 5.0}),
        ("b", {"gpu": 2.0}, {}),
    ]
