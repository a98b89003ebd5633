"""The placement that a server tells: as JSON, and as a page that shows it."""

import base64
import hashlib
import json
import re

import placement_records as records
import pytest
from pages import Page

from oallama.core.history import BlockRuns
from oallama.core.types import OperatorPlacement, Predicted, Workload
from oallama.core.units import format_bytes
from oallama.place.simulate import Course, Simulation, Work
from oallama.report.placement import page_policy, place_of, placement_document, placement_html, work_times
from oallama.report.plan import weights_on_device
from oallama.report.text import percent

STATE = {"phase": "ready", "on_device": True, "said": None, "restarts": 0, "pid": 1, "ready_at": 1.0}
SERVED = pytest.mark.parametrize("made", [records.served(), records.on_cpu(records.served()), records.hostile()])


@SERVED
def test_the_document_is_json_of_every_operator(made):
    told = json.loads(json.dumps(placement_document(made, STATE, None), allow_nan=False))
    assert [row["name"] for row in told["operators"]] == [operator.name for operator in made.operators]
    assert told["plan"]["operators"][0]["name"] == made.operators[0].name
    assert told["state"] == STATE and told["live"] is None
    assert told["memory"]["weights_gpu"] == made.plan.memory.weights_gpu


def test_times_are_those_of_operators_and_of_other_work():
    told = placement_document(
        records.served(), STATE, {"processing": 1}, [BlockRuns("blk.1.ffn_gate.weight", 1, 2, 2, 6.0, 3.0, 1.0)]
    )
    rows = {row["name"]: row for row in told["operators"]}
    assert rows["blk.0.attn_q.weight"]["on"] == "CPU"
    assert rows["blk.0.attn_q.weight"]["predicted"] == {"token_s": {"cpu": 20e-6}, "prompt_s": {"cpu": 1e-3}}
    assert rows["blk.1.ffn_up.weight"]["on"] == "both" and rows["blk.1.ffn_up.weight"]["predicted"] is None
    assert rows["output.weight"]["on"] == "GPU"
    assert (
        rows["blk.1.ffn_gate.weight"]["measured"]
        == [{"batch": 1, "runs": 2, "tokens": 2, "seconds": 5.0, "cpu_s": 3.0, "wait_s": 1.5, "other_s": 0.5}]
        and rows["blk.1.ffn_up.weight"]["measured"] is None
    )
    assert [work["name"] for work in told["other_work"]] == ["layer 1: FFN"]
    assert told["live"] == {"processing": 1}


def test_nothing_is_claimed_where_nothing_was_measured():
    told = placement_document(records.on_cpu(records.served()), STATE, None)
    assert told["predicted"] is None and {row["predicted"] for row in told["operators"]} == {None}
    assert told["other_work"] == []


def test_places():
    shares = {(1.0, 0.0, 0.0): "GPU", (0.0, 0.0, 1.0): "CPU", (0.0, 1.0, 0.0): "both", (0.2, 0.3, 0.5): "both"}
    assert {key: place_of(OperatorPlacement("x", *key)) for key in shares} == shares


def test_works_are_added_up_by_name_kind_and_stream():
    token = Course((Work("cpu", "operator", "a", 0.0, 1.0), Work("gpu", "operator", "b", 1.0, 3.0)), 3.0)
    prompt = Course((Work("cpu", "operator", "a", 0.0, 2.0), Work("cpu", "operator", "a", 2.0, 5.0)), 5.0)
    times = work_times(Simulation(Workload(8, 8, 256), Predicted(0.0, 0.0, 0.0), prompt, token))
    assert [(t.name, t.token_s, t.prompt_s) for t in times] == [
        ("a", {"cpu": 1.0}, {"cpu": 5.0}),
        ("b", {"gpu": 2.0}, {}),
    ]


@SERVED
def test_nothing_runs_on_the_page_but_our_own(made):
    page = Page(placement_html(made))
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
        assert "style" not in attributes and "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert not re.search(r"innerHTML|eval|https?://", page.raw["script"])
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page_policy()


def test_hostile_names_stay_text():
    text = placement_html(records.hostile())
    page = Page(text)
    assert "<img" not in text and "<!--" not in text and "\x1b" not in text and "\u202e" not in text
    assert page.text.count("<script>alert('x')</script>") >= 4
    assert "49" not in re.findall(r"\{\{7\*7\}\}|49(?=\}\})", text)


def test_the_page_shows_who_computes_what():
    page = Page(placement_html(records.served()))
    marks = [attributes for tag, attributes in page.elements if tag == "a"]
    letters = [next(c for c in mark["class"].split() if c.startswith("on-")) for mark in marks]
    assert (letters.count("on-C"), letters.count("on-S"), letters.count("on-G")) == (5, 3, 8)
    told = "divided between card and CPU, 50% on the card, 25% copied when needed"
    assert any(told in mark["aria-label"] for mark in marks)
    live = {attributes["data-live"] for _, attributes in page.elements if "data-live" in attributes}
    assert live == {"state", "generation", "prompt", "requests", "said"}
    assert "predicted 2,500 tokens/s" in page.text


def test_the_page_has_the_share_of_operators_weights_that_every_line_tells():
    made = records.served()
    on_device, total = weights_on_device(made.plan, made.operators)
    text = Page(placement_html(made)).text
    assert percent(on_device, total) == "69%"
    told = rf"69%\s*{re.escape(format_bytes(on_device))} of {re.escape(format_bytes(total))}"
    assert re.search(rf"Weights on the device\s*{told}", text)


def test_the_page_says_that_nothing_was_measured():
    assert "Nothing was measured yet" in Page(placement_html(records.on_cpu(records.served()))).text
