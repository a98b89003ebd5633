"""Plans survive the trip through JSON, old files stay readable, and what is no plan is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import PlanError
from oallama.core.types import (
    MemoryLedger,
    ModelInfo,
    Operator,
    OperatorPlacement,
    Predicted,
    StreamSettings,
    Workload,
)
from oallama.place.placement import unmeasured_cpu_record
from oallama.plan.export import export_command
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts

GOLDEN = Path(__file__).parent.parent / "golden"

LEDGER = MemoryLedger(6000, 0.9, 5400, 3000, 2000, 512, 256, 0, 1632)

OPERATORS = (
    Operator("blk.0.attn_q.weight", 0, "attn_q", "MUL_MAT", "F16", (512, 512, 1), 524288, 1.0),
    Operator("blk.0.ffn_up.weight", 0, "ffn_up", "MUL_MAT", "Q4_K", (512, 1536, 1), 442368, 1.0),
    Operator("blk.0.ffn_down.weight", 0, "ffn_down", "MUL_MAT", "Q4_K", (1536, 512, 1), 442368, 1.0),
    Operator("output.weight", None, "output", "MUL_MAT", "Q6_K", (512, 4096, 1), 1720320, 1.0),
)

MODEL = ModelInfo(
    path="models/tiny.gguf", arch="llama", name="tiny", n_layer=1, n_embd=512, n_ff=1536, n_head=8, n_head_kv=4,
    n_embd_head_k=64, n_embd_head_v=64, n_expert=0, n_expert_used=0, n_vocab=4096, n_ctx_train=512,
    file_bytes=3200000, fingerprint="ab" * 32,
)  # fmt: skip


def placements(*fractions: tuple[float, float, float]) -> tuple[OperatorPlacement, ...]:
    return tuple(OperatorPlacement(op.name, *f) for op, f in zip(OPERATORS, fractions, strict=True))


HALF = placements((1, 0, 0), (0, 0, 1), (0, 0, 1), (1, 0, 0))


def record(operators: tuple[OperatorPlacement, ...] = HALF, **changes: Any) -> Plan:
    plain = Plan(
        model_path=MODEL.path, model_fingerprint=MODEL.fingerprint, machine_fingerprint="cd" * 32, device="CUDA0",
        policy="oato", workload=Workload(64, 32, 512), operators=operators, n_gpu_layers=999, memory=LEDGER,
        predicted=Predicted(0.25, 0.0125, 0.65),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@st.composite
def fractions(draw: st.DrawFn) -> tuple[float, float, float]:
    units = draw(st.integers(1, 5000))
    gg = draw(st.integers(0, units))
    cg = draw(st.integers(0, units - gg))
    return gg / units, cg / units, (units - gg - cg) / units


STREAMING = st.builds(
    StreamSettings,
    st.integers(1, 64),
    st.sampled_from(["ahead", "layer"]),
    st.booleans(),
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 40),
)


@given(
    st.lists(fractions(), max_size=8), st.sampled_from([None, "CPU", "CPU_REPACK"]), st.integers(1, 4096),
    st.none() | STREAMING,
)  # fmt: skip
def test_json_round_trip_keeps_every_field(
    rows: list[tuple[float, float, float]], layout: str | None, n_ubatch: int, streaming: StreamSettings | None
) -> None:
    operators = tuple(OperatorPlacement(f"blk.{i}.ffn_up.weight", *f, layout) for i, f in enumerate(rows))
    workload = Workload(64, 32, 512, n_ubatch)
    table = ((1, 1), (512, 300))
    made = record(operators, workload=workload, token_assignment=table, streaming=streaming, extra={"note": ["x", 1]})
    plan = made
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_save_and_load(tmp_path: Path) -> None:
    plan = record()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "no temporary file stays"


def test_saving_replaces_an_older_plan_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("x" * 100_000)
    record().save(path)
    assert Plan.load(path) == record()


def test_saving_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write"):
        record().save(tmp_path / "missing" / "plan.json")
    for folder in (tmp_path, "", ".", "/"):
        with pytest.raises(PlanError, match="it is a folder"):
            record().save(folder)


def test_the_stored_plan_of_version_1_stays_readable() -> None:
    plan = Plan.load(GOLDEN / "plan_v1.json")
    assert (plan.policy, plan.device, plan.n_gpu_layers) == ("oato", "CUDA0", 999)
    assert plan.workload == Workload(n_prompt=64, n_gen=32, n_ctx=512, n_ubatch=512)
    assert plan.token_assignment == ((512, 384),)
    assert plan.operators[1] == OperatorPlacement("blk.0.ffn_up.weight", 0.25, 0.25, 0.5, "CPU_REPACK")
    assert plan.memory.limit == 5400 and plan.predicted.tpot_s == 0.0125
    assert plan.extra == {"comment": "written by hand for the test of version 1"}
    assert plan.streaming is None
    written = json.loads((GOLDEN / "plan_v1.json").read_text())
    written["workload"]["n_ubatch"] = 512
    assert plan.to_json() == written | {"version": 2}
    assert list(plan.to_json()) == list(written)


def test_what_an_older_plan_says_of_joining_is_ignored_with_a_note() -> None:
    plan = record()
    document = plan.to_json()
    document["operators"][0]["alone"] = True
    read = Plan.from_json(document)
    assert read.operators == plan.operators
    assert read.notes[:-1] == plan.notes and "`alone`" in read.notes[-1]
    assert Plan.from_json(document | {"notes": list(read.notes)}).notes == read.notes, "once"


def test_the_cut_in_elements_counts_unless_the_fractions_beside_it_were_edited() -> None:
    third = tuple(OperatorPlacement.of_cut(op.name, (0, 0, 1)) for op in OPERATORS)
    third = (*third[:2], OperatorPlacement.of_cut(OPERATORS[2].name, (1024, 0, 512), "CPU_REPACK"), third[3])
    document = record(third).to_json()
    assert document["operators"][2]["cut"] == [1024, 0, 512]
    read = Plan.from_json(json.loads(json.dumps(document)))
    assert read == record(third) and [p.cut for p in read.operators] == [p.cut for p in third]
    assert slice_counts(OPERATORS[2], read.operators[2]) == (1024, 0, 512)
    document["operators"][2] |= {"gg": 2 / 3, "cc": 1 / 3}
    edited = Plan.from_json(document)
    assert slice_counts(OPERATORS[2], edited.operators[2]) == (512, 0, 1024)
    assert edited.notes == ("the cut of operator blk.0.ffn_down.weight is not what its fractions say, which count",)
    other = record((*third[:2], OperatorPlacement.of_cut(OPERATORS[2].name, (1000, 0, 536)), third[3]))
    with pytest.raises(PlanError, match=r"ffn_down.*256 of 1536 columns"):
        other.check(MODEL, OPERATORS)


def test_the_contract_keys_are_there() -> None:
    document = record().to_json()
    assert set(document) == {
        "version", "model", "machine", "device", "policy", "workload", "operators", "token_assignment", "n_gpu_layers",
        "memory", "predicted",
    }  # fmt: skip
    assert document["operators"][0] == {"name": "blk.0.attn_q.weight", "gg": 1, "cg": 0, "cc": 0}
    assert set(document["model"]) == {"path", "fingerprint"}
    assert set(document["predicted"]) == {"ttft_s", "tpot_s", "total_s"}


@pytest.mark.parametrize("version", [0, 3, 99])
def test_other_versions_are_refused_by_name(version: int) -> None:
    with pytest.raises(PlanError, match=rf"version {version}\b.*versions 1 to 2"):
        Plan.from_json({**record().to_json(), "version": version})


def broken(path: str, value: Any) -> dict[str, Any]:
    """A plan's JSON with one value at `a/b/0/c` replaced; `...` removes it."""
    document = json.loads(json.dumps(record().to_json()))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    target = document
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", ...),
        ("version", "1"),
        ("version", True),
        ("device", ...),
        ("device", 5),
        ("model", []),
        ("model/fingerprint", ...),
        ("operators", {}),
        ("operators/0", "blk.0"),
        ("operators/0/gg", "1"),
        ("operators/0/gg", float("nan")),
        ("operators/0/gg", 10**400),
        ("operators/0/gg", 1.5),
        ("operators/0/gg", 0.5),
        ("operators/0/cc", 1e-6),
        ("operators/0/layout", 3),
        ("operators/0/name", "output.weight"),
        ("workload/n_ctx", -1),
        ("workload/n_ubatch", 0),
        ("workload/n_prompt", 1.5),
        ("token_assignment", [[512, 1]]),
        ("token_assignment", [{"n_tokens": 512, "n_g": 513}]),
        ("token_assignment", [{"n_tokens": 512, "n_g": 1}, {"n_tokens": 512, "n_g": 1}]),
        ("token_assignment", [{"n_tokens": 0, "n_g": 0}]),
        ("streaming", None),
        ("streaming", {"n_slots": 2, "prefetch": "ahead"}),
        ("streaming", {"n_slots": 2, "prefetch": "behind", "kept_twice": False}),
        ("streaming", {"n_slots": 2, "prefetch": "layer", "kept_twice": 0}),
        ("streaming", {"n_slots": 0, "prefetch": "layer", "kept_twice": False}),
        ("streaming", {"n_slots": 65, "prefetch": "layer", "kept_twice": False}),
        ("memory/kv", "12"),
        ("predicted/ttft_s", float("inf")),
    ],
)
def test_a_broken_plan_is_refused_in_one_sentence(path: str, value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(broken(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", "1", "it.json is not a plan: an object with a whole number as its version is needed"),
        ("device", ..., "it.json: plan: device is missing"),
        ("model", [], "it.json: plan.model must be an object, not []"),
        ("operators/0/gg", "1", "it.json: plan.operators[0]: gg must be a number, not '1'"),
        ("workload/n_ubatch", 0, "it.json: plan.workload: n_ubatch must be above 0, not 0"),
        ("token_assignment", [[512, 1]], "it.json: plan.token_assignment[0] must be an object, not [512, 1]"),
        ("streaming", None, "it.json: plan.streaming must be an object, not None"),
        ("notes", [5], "it.json: plan: notes[0] must be text, not 5"),
        ("policy", "x\x1b[2J", r"it.json: plan: policy must be printable text in one line, not 'x\x1b[2J'"),
        (
            "operators/0/layout",
            "a\nb",
            r"it.json: plan.operators[0]: layout must be printable text in one line, not 'a\nb'",
        ),
        ("workload/n_ctx", 1 << 31, "it.json: plan.workload: n_ctx must be a whole number of 32 bits, not 2147483648"),
        ("memory/kv", 1 << 63, "it.json: plan.memory: kv must be a whole number of 64 bits, not 9223372036854775808"),
        ("predicted/ttft_s", None, "it.json: plan.predicted: ttft_s must be a number, not None"),
    ],
)
def test_the_key_and_what_was_expected_are_named(path: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(broken(path, value), "it.json")
    assert str(caught.value) == f"{said}; make it again with `oallama plan`"


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "nonsense", "[" * 100_000, '{"version": 1}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match="plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no-such\.json"):
        Plan.load(tmp_path / "no-such.json")


def test_a_plan_for_this_model_passes() -> None:
    record().check(MODEL, OPERATORS)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="fingerprint"):
        record(model_fingerprint="ef" * 32).check(MODEL, OPERATORS)


def test_missing_and_unknown_operators_are_named() -> None:
    with pytest.raises(PlanError, match=r"no place for operator output\.weight"):
        record(HALF[:-1]).check(MODEL, OPERATORS)
    with pytest.raises(PlanError, match=r"output\.weight, which this model does not have"):
        record().check(MODEL, OPERATORS[:-1])
    with pytest.raises(PlanError, match=r"no place for operator blk\.0\.attn_q\.weight and 1 more"):
        record(HALF[1:-1]).check(MODEL, OPERATORS)


def test_fractions_are_multiples_of_the_split_granularity() -> None:
    sliced = placements((1, 0, 0), (1 / 3, 0, 2 / 3), (1 / 3, 0, 2 / 3), (0, 1, 0))
    record(sliced).check(MODEL, OPERATORS)
    between = placements((1, 0, 0), (1 / 3, 0, 2 / 3), (0.25, 0, 0.75), (0, 1, 0))
    with pytest.raises(PlanError, match=r"ffn_down.*256 of 1536 columns; the nearest is 0\.6666"):
        record(between).check(MODEL, OPERATORS)


def test_the_fingerprint_follows_the_content() -> None:
    assert record().fingerprint == record().fingerprint
    assert record().fingerprint != record(n_gpu_layers=1).fingerprint


def test_export_quotes_for_the_shell() -> None:
    plan = record(model_path="my models/it's.gguf")
    command = export_command(plan, OPERATORS, [op.name for op in OPERATORS])
    words = shlex.split(command)
    assert words[0] == "llama-server"
    assert words[words.index("-m") + 1] == "my models/it's.gguf"
    assert words[words.index("-ngl") + 1] == "999"
    assert words[words.index("--device") + 1] == "CUDA0"
    assert words[words.index("-ot") + 1] == r"^blk\.0\.(?:ffn_down\.weight|ffn_up\.weight)$=CPU"


def test_export_of_remote_and_host_only_plans() -> None:
    names = [op.name for op in OPERATORS]
    remote = shlex.split(export_command(record(device="rpc://10.0.0.2:50052"), OPERATORS, names, "llama-cli"))
    assert remote[0] == "llama-cli"
    assert remote[remote.index("--rpc") + 1] == "10.0.0.2:50052" and remote[remote.index("--device") + 1] == "RPC0"
    host_only = shlex.split(export_command(record(device="none"), OPERATORS, names))
    assert host_only[-4:] == ["--device", "none", "-ngl", "0"]
    with pytest.raises(PlanError, match="rpc-server"):
        export_command(record(device="rpc-worker:1"), OPERATORS, names)


def test_a_plan_without_a_profile_predicts_nothing_and_survives_a_round_trip(tmp_path: Path) -> None:
    operator = Operator("output.weight", None, "output", "MUL_MAT", "F16", (256, 1000, 1), 512_000, 1.0)
    model = ModelInfo("m.gguf", "llama", "m", 2, 256, 512, 8, 2, 32, 32, 0, 0, 1000, 512, 1, "f" * 64)
    plan = unmeasured_cpu_record(model, [operator], Workload(8, 8, 256), 512_000)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.predicted is None
    assert again.to_json()["predicted"] == {"ttft_s": None, "tpot_s": None, "total_s": None}
    assert again.operators[0].cc == 1
