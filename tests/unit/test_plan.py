"""Plan files: saved whole, old ones stay readable, what is no plan is refused in one sentence. That any plan survives
the trip through JSON: test_every_plan.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worlds import World, model_info, placed, some_plan, weight

from oallama.core.errors import PlanError
from oallama.core.types import OperatorPlacement, Predicted, Workload
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts

GOLDEN = Path(__file__).parent.parent / "golden"

OPERATORS = (
    weight(role="attn_q", k=512, n=512, layer=0, type_name="F16"),
    weight(role="ffn_up", k=512, n=1536, layer=0, type_name="Q4_K"),
    weight(role="ffn_down", k=1536, n=512, layer=0, type_name="Q4_K"),
    weight(role="output", k=512, n=4096, type_name="Q6_K"),
)
MODEL = model_info(n_layer=1)
NAMES = [operator.name for operator in OPERATORS]


def places(*gg: float, cg: float = 0.0) -> list[OperatorPlacement]:
    return [placed(name, gg=share, cg=cg if share < 1 else 0.0) for name, share in zip(NAMES, gg, strict=True)]


HALF = places(1, 0, 0, 1)


def plan(operators: list[OperatorPlacement] = HALF, **changes: Any) -> Plan:
    return some_plan(
        operators, **{"policy": "oato", "predicted": Predicted(ttft_s=0.25, tpot_s=0.0125, total_s=0.65), **changes}
    )


def test_a_plan_is_saved_whole_or_it_is_said_that_it_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("x" * 100_000)
    plan().save(path)
    assert Plan.load(path) == plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "no temporary file stays"
    with pytest.raises(PlanError, match="cannot write"):
        plan().save(tmp_path / "missing" / "plan.json")
    for folder in (tmp_path, "", ".", "/"):
        with pytest.raises(PlanError, match="a folder; name a file"):
            plan().save(folder)


def test_the_stored_plan_of_version_1_stays_readable() -> None:
    read = Plan.load(GOLDEN / "plan_v1.json")
    assert (read.policy, read.device, read.n_gpu_layers) == ("oato", "CUDA0", 999)
    assert read.workload == Workload(n_prompt=64, n_gen=32, n_ctx=512, n_ubatch=512)
    assert read.token_assignment == ((512, 384),)
    assert read.operators[1] == placed(NAMES[1], gg=0.25, cg=0.25, layout="CPU_REPACK")
    assert read.memory.limit == 5400 and read.predicted.tpot_s == 0.0125
    assert read.extra == {"comment": "written by hand for the test of version 1"}
    assert read.streaming is None and read.attention is None
    written = json.loads((GOLDEN / "plan_v1.json").read_text())
    written["workload"]["n_ubatch"] = 512
    assert read.to_json() == written | {"version": 2}
    assert list(read.to_json()) == list(written)


def test_the_cut_in_elements_counts_unless_the_fractions_beside_it_were_edited() -> None:
    third = [OperatorPlacement.of_cut(name, (0, 0, 1)) for name in NAMES]
    third[2] = OperatorPlacement.of_cut(NAMES[2], (1024, 0, 512), "CPU_REPACK")
    document = plan(third).to_json()
    assert document["operators"][2]["cut"] == [1024, 0, 512]
    read = Plan.from_json(json.loads(json.dumps(document)))
    assert read == plan(third) and [p.cut for p in read.operators] == [p.cut for p in third]
    assert slice_counts(OPERATORS[2], read.operators[2]) == (1024, 0, 512)
    document["operators"][2] |= {"gg": 2 / 3, "cc": 1 / 3}
    edited = Plan.from_json(document)
    assert slice_counts(OPERATORS[2], edited.operators[2]) == (512, 0, 1024)
    assert edited.notes == (f"the cut of operator {NAMES[2]} differs from its fractions; using the fractions",)
    other = plan([*third[:2], OperatorPlacement.of_cut(NAMES[2], (1000, 0, 536)), third[3]])
    with pytest.raises(PlanError, match=r"ffn_down.*256 of 1536 columns"):
        other.check(MODEL, OPERATORS)


def test_the_contract_keys_are_there() -> None:
    document = plan().to_json()
    assert set(document) == {
        "version", "model", "machine", "device", "policy", "workload", "operators", "token_assignment", "n_gpu_layers",
        "memory", "predicted",
    }  # fmt: skip
    assert document["operators"][0] == {"name": "blk.0.attn_q.weight", "gg": 1, "cg": 0, "cc": 0}
    assert set(document["model"]) == {"path", "fingerprint"}
    assert set(document["predicted"]) == {"ttft_s", "tpot_s", "total_s"}
    assert plan(predicted=None).to_json()["predicted"] == {"ttft_s": None, "tpot_s": None, "total_s": None}


def broken(path: str, value: Any) -> dict[str, Any]:
    """A plan's JSON with one value at `a/b/0/c` replaced; `...` removes it."""
    document = json.loads(json.dumps(plan().to_json()))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    target = document
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return document


STEP = {"n_parallel": 1, "n_draft": 2, "accepted": 1.0, "draft_s": 0.0, "draft_prompt_s": 0.0}
STREAM = {"n_slots": 2, "prefetch": "ahead", "kept_twice": False}
F16 = {"flash_attn": "on", "type_k": "f16", "type_v": "f16"}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", ..., "it.json is not a valid plan: "),
        ("version", "1", "it.json is not a valid plan: it must be an object with a whole number as version"),
        ("version", 0, "it.json has plan version 0, but this oallama reads versions 1 to 3; "),
        ("version", 4, "it.json has plan version 4, but this oallama reads versions 1 to 3; "),
        ("model/fingerprint", ..., "it.json: model, machine or token_assignment lacks 'fingerprint'"),
        ("model", [], "it.json: plan: model must be an object, not []"),
        ("device", ..., "it.json: plan: device is missing"),
        ("operators/0/gg", "1", "it.json: plan.operators[0]: gg must be a number, not '1'"),
        ("operators/0/gg", float("nan"), "it.json: plan.operators[0]: gg must be a number, not nan"),
        ("operators/0/gg", 10**400, "it.json: plan.operators[0]: gg must be a number, not 1000"),
        ("operators/0/gg", 1.5, "operator blk.0.attn_q.weight has a fraction outside 0..1"),
        ("operators/0/gg", 0.5, "operator blk.0.attn_q.weight: gg + cg + cc must be 1, not 0.5"),
        ("operators/0/cc", 1e-6, "operator blk.0.attn_q.weight: gg + cg + cc must be 1, not 1.000001"),
        ("operators/0/name", "output.weight", "operator output.weight is placed twice"),
        ("workload/n_ctx", -1, "it.json: plan.workload: n_ctx must be at least 0, not -1"),
        ("workload/n_ctx", 1 << 31, "it.json: plan.workload: n_ctx must be a whole number of 32 bits, not 2147483648"),
        ("workload/n_ubatch", 0, "it.json: plan.workload: n_ubatch must be above 0, not 0"),
        ("token_assignment", [{"n_tokens": 512, "n_g": 513}], "token_assignment: n_g is 513 at 512 tokens"),
        ("token_assignment", [{"n_tokens": 512, "n_g": 1}, {"n_tokens": 512, "n_g": 1}], ""),
        ("token_assignment", [{"n_tokens": 0, "n_g": 0}], ""),
        ("token_assignment", [[512, 1]], "it.json: plan: token_assignment[0] must be an object, not [512, 1]"),
        ("streaming", {"n_slots": 2, "prefetch": "ahead"}, "it.json: plan.streaming: kept_twice is missing"),
        ("streaming", STREAM | {"prefetch": "behind"}, "it.json: plan.streaming: prefetch must be one of ahead, layer"),
        ("streaming", STREAM | {"kept_twice": 0}, "it.json: plan.streaming: kept_twice must be true or false"),
        ("streaming", STREAM | {"n_slots": 0}, ""),
        ("streaming", STREAM | {"n_slots": 65}, ""),
        ("attention", "off", "it.json: plan.attention must be an object, not 'off'"),
        ("attention", F16 | {"type_k": "q3"}, ""),
        (
            "attention",
            F16 | {"flash_attn": "maybe"},
            "it.json: plan.attention: flash_attn must be one of auto, on, off",
        ),
        ("attention", {"flash_attn": "on", "type_k": "f16"}, "it.json: plan.attention: type_v is missing"),
        ("notes", [5], "it.json: plan: notes[0] must be a string, not 5"),
        ("policy", "x\x1b[2J", r"it.json: plan: policy must be one line of printable text, not 'x\x1b[2J'"),
        ("memory/kv", 1 << 63, "it.json: plan.memory: kv must be a whole number of 64 bits, not 9223372036854775808"),
        ("predicted/ttft_s", float("inf"), "it.json: plan.predicted: ttft_s must be a number, not inf"),
        ("predicted/ttft_s", None, "it.json: plan.predicted: ttft_s must be a number, not None"),
        ("workload/step", STEP | {"accepted": -1.0}, "the plan's decode step is not valid"),
        ("workload/step", STEP | {"accepted": 2.5}, "the plan's decode step is not valid"),
        ("workload/step", STEP | {"draft_s": -1e-3}, "the plan's decode step is not valid"),
        ("workload/step", STEP | {"n_parallel": 0}, "it.json: plan.workload.step: n_parallel must be above 0, not 0"),
        ("draft", {"kind": "x", "n_draft": 1}, "it.json: plan.draft: kind must be one of draft-simple, draft-mtp"),
        (
            "draft",
            {"kind": "draft-mtp", "n_draft": 1},
            "the plan's draft is of kind draft-mtp, but its decode step is not",
        ),
        ("draft", {"kind": "draft-simple", "n_draft": 1}, "the plan's draft must name a model"),
    ],
)
def test_a_broken_plan_is_refused_in_one_sentence_that_names_what(path: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(broken(path, value), "it.json")
    assert str(caught.value).startswith(said) and ("make it again" in str(caught.value)) is ("it.json" in said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "nonsense", "[" * 100_000, '{"version": 1}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="plan"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"no-such\.json"):
        Plan.load(tmp_path / "no-such.json")


@pytest.mark.parametrize(
    ("made", "operators", "says"),
    [
        (plan(model_fingerprint="ef" * 32), OPERATORS, "fingerprint"),
        (plan(HALF[:-1]), OPERATORS, r"does not place operator output\.weight"),
        (plan(HALF[1:-1]), OPERATORS, r"does not place operator blk\.0\.attn_q\.weight and 1 more"),
        (plan(), OPERATORS[:-1], r"output\.weight, which this model does not have"),
        (plan(places(1, 1 / 3, 0.25, 0)), OPERATORS, r"ffn_down.*256 of 1536 columns; the nearest is 0\.6666"),
    ],
)
def test_a_plan_for_another_model_is_refused(made: Plan, operators: Any, says: str) -> None:
    """Or one that cuts within what is quantised together."""
    plan().check(MODEL, OPERATORS)
    plan(places(1, 1 / 3, 1 / 3, 0)).check(MODEL, OPERATORS)
    with pytest.raises(PlanError, match=says):
        made.check(MODEL, operators)


def test_the_fingerprint_follows_the_content() -> None:
    assert plan().fingerprint == plan().fingerprint
    assert plan().fingerprint != plan(n_gpu_layers=1).fingerprint


def test_a_plan_without_a_profile_predicts_nothing() -> None:
    made = World().alone().plan("cpu", measure=False, n_ctx=512, n_prompt=64)
    assert made.predicted is None and {place.cc for place in made.operators} == {1}
    assert Plan.from_json(made.to_json()) == made
