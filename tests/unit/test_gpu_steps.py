"""scripts/gpu_run: which steps there are, which one comes next, and what is kept between calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from experiments.child import Ended, json_lines, run_child
from experiments.inputs import InputError
from experiments.machine import backend_of
from experiments.results import CUT, DONE, FAILED, NAME, Results
from experiments.traces import events_of, last_token, overlap_of, sums_of, union
from gpu_steps.correctness import BOUNDS, bound, cases, verdict
from gpu_steps.kinds import StepSetting, run_step
from gpu_steps.scale import ALL_TYPES, FULL, LEASE, QUANTISED, SCALES, SMALL
from gpu_steps.schedule import MAX_TRIES, RESERVE_S, choose, expected_seconds, pace_of
from gpu_steps.steps import GIB, GpuStep, steps_of

POLICIES = ("auto", "oato", "split", "layers", "cpu")
STEPS = (
    GpuStep("first", "", "a", 10),
    GpuStep("second", "", "b", 50, needs=("first",)),
    GpuStep("third", "", "b", 20, models=(SMALL.oato_q4,)),
)


def results(folder: Path, device: str = "CUDA0", scale: str = "lease", **options: Any) -> Results:
    return Results(folder / NAME, {"device": device, "scale": scale}, **options)


def result(state: str, seconds: float = 1.0, tries: int = 1) -> dict[str, Any]:
    return {"state": state, "seconds": seconds, "tries": tries}


#
# which steps there are
#


def test_the_order_is_what_a_run_that_is_cut_short_should_have_done() -> None:
    kinds = [step.kind for step in steps_of(LEASE, "CUDA0", 16, POLICIES)]
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    order = ["machine", "doctor", "correctness", "copies", "profile", "ab", "timeline", "device", "switches"]
    assert sorted(first, key=lambda kind: first[kind]) == order


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_step_has_a_name_of_its_own_and_needs_ones_before_it(scale: Any) -> None:
    steps = steps_of(scale, "CUDA0", 16, POLICIES)
    names = [step.id for step in steps]
    assert len(set(names)) == len(names)
    for i, step in enumerate(steps):
        assert set(step.needs) <= set(names[:i])
        if "model" in step.settings:
            assert [shape.name for shape in step.models] == [step.settings["model"]]


def test_the_settings_of_both_papers_are_there() -> None:
    steps = {step.id: step for step in steps_of(FULL, "CUDA0", 16, POLICIES)}
    for share in ("25", "50", "75"):
        step = steps[f"oato-llama3-8b-32l-f16-{share}"]
        assert step.settings["cap"] == ["--gpu-weights", f"{share}%"]
        assert (step.settings["n_prompt"], step.settings["n_gen"]) == (64, 32)
        assert {"stock-fit", "stock-ngl", "stock-cpu", "layers", "oato", "split"} <= set(step.settings["arms"])
    for model in ("mixtral-8x7b-32l", "llama2-70b-80l"):
        for gib in (12, 24):
            step = steps[f"scheinfer-{model}-q4_0-{gib}"]
            assert step.settings["cap"] == ["--vram", str(gib * GIB), "--vram-fill", "1"]
            assert (step.settings["n_prompt"], step.settings["n_gen"]) == (1024, 128)
            assert "layers" in step.settings["arms"]
    assert [steps[f"profile-llama3-8b-32l-q4_0-{n}t"].settings["threads"] for n in (4, 8, 16)] == [4, 8, 16]
    types = [steps[f"correctness-split{suffix}"].settings["types"] for suffix in ("", "-others")]
    assert sorted(types[0] + types[1]) == sorted(ALL_TYPES) and len(types[0]) < 10 and len(QUANTISED) > 20


def test_all_arms_are_compared_under_the_same_memory() -> None:
    for scale in SCALES.values():
        steps = [step for step in steps_of(scale, "CUDA0", 16, POLICIES) if step.id.startswith("memory-")]
        for step in steps:
            option, cap, *fill = step.settings["cap"]
            assert (option, fill) == ("--vram", ["--vram-fill", "1"])
            assert int(cap) < step.models[0].n_bytes, "where all fits, all are the same"
        assert {step.settings.get("n_ubatch") for step in steps} == {None, 512, 2048}
        assert all({"stock-fit", "stock-ngl", "layers"} <= set(step.settings["arms"]) for step in steps)
        assert any("stock-cpu" in step.settings["arms"] for step in steps)
        assert {step.models[0] for step in steps} == {scale.oato_q4, scale.oato_f16}
    full = steps_of(FULL, "CUDA0", 16, POLICIES)
    caps = [int(step.settings["cap"][1]) for step in full if "memory-llama3-8b-32l-f16" in step.id]
    assert sorted(caps) == [3 * GIB, 6 * GIB, 12 * GIB]


def test_what_a_cell_asks_for_is_what_bench_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def run(self: StepSetting, *arguments: object, limit_s: float) -> Ended:
        told.extend(map(str, arguments))
        return Ended(0, False, "", "", 1.0)

    monkeypatch.setattr(StepSetting, "oallama", run)
    setting = StepSetting("CUDA0", 8, "", tmp_path, tmp_path / "log.txt", {}, lambda name: tmp_path / f"{name}.gguf")
    steps = {step.id: step for step in steps_of(LEASE, "CUDA0", 16, POLICIES)}
    found = run_step(steps["memory-llama3-8b-32l-q4_0-3g-ub2048"], setting, 100.0, 1)
    pairs = [" ".join(told[i : i + 2]) for i in range(len(told))]
    assert {"-ub 2048", "-pg 2048,32", f"--vram {3 * GIB}"} <= set(pairs) and found["n_ubatch"] == 2048
    told.clear()
    assert run_step(steps["oato-llama3-8b-32l-q4_0-50"], setting, 100.0, 1)["n_ubatch"] is None and "-ub" not in told


def test_a_cap_shrinks_with_the_layers() -> None:
    steps = {step.id: step for step in steps_of(LEASE, "CUDA0", 16, POLICIES)}
    cap = steps["scheinfer-llama2-70b-8l-q4_0-24"].settings["cap"]
    assert cap[:2] == ["--vram", str(round(24 * GIB * 8 / 80))]


def test_arms_are_those_that_this_version_knows() -> None:
    def arms(policies: tuple[str, ...]) -> set[str]:
        steps = steps_of(LEASE, "CUDA0", 16, policies)
        return {arm for step in steps for arm in step.settings.get("arms", [])}

    assert "scheinfer" not in arms(POLICIES) and "scheinfer" in arms((*POLICIES, "scheinfer"))
    assert "stock-ncmoe" in arms(()) and "oato" not in arms(())


def test_threads_are_no_more_than_there_are() -> None:
    steps = [step for step in steps_of(LEASE, "CUDA0", 6, POLICIES) if step.kind == "profile"]
    assert [step.settings["threads"] for step in steps if step.settings["threads"]] == [6, 4]


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("CUDA0", "CUDA"),
        ("Vulkan1", "Vulkan"),
        ("rpc-worker:1:1", "RPC"),
        ("rpc://h:1", "RPC"),
        ("cpu-pair", "cpu-pair"),
    ],
)
def test_backends_by_device(device: str, backend: str) -> None:
    assert backend_of(device) == backend


#
# which one comes next
#


def chosen(results: dict[str, Any], remaining_s: float, models: dict[str, float] | None = None) -> str | None:
    step = choose(STEPS, results, remaining_s, models or {}).step
    return step.id if step else None


def test_steps_are_taken_in_order() -> None:
    assert chosen({}, 1000) == "first"
    assert chosen({"first": result(DONE)}, 1000) == "second"
    assert chosen({"first": result(DONE), "second": result(DONE)}, 1000) == "third"
    assert chosen({name: result(DONE) for name in ("first", "second", "third")}, 1000) is None


def test_a_step_that_does_not_fit_makes_room_for_the_next_that_does() -> None:
    done = {"first": result(DONE, 10)}
    choice = choose(STEPS, done, 40 + RESERVE_S, {})
    assert choice.step is not None and choice.step.id == "third" and choice.waiting == ("second",)
    assert choose(STEPS, done, 10 + RESERVE_S, {}).waiting == ("second", "third")


def test_writing_a_model_counts() -> None:
    done = {"first": result(DONE, 10), "second": result(DONE, 50)}
    assert chosen(done, 25 + RESERVE_S) == "third"
    assert chosen(done, 25 + RESERVE_S, {SMALL.oato_q4.name: 6.0}) is None


def test_estimates_follow_what_others_of_the_kind_took() -> None:
    results = {"first": result(DONE, 10), "second": result(DONE, 100)}
    assert pace_of(STEPS, results) == {"a": 1.0, "b": 2.0}
    assert expected_seconds(STEPS[2], {}, pace_of(STEPS, results)) == 40
    assert chosen(results, 39 + RESERVE_S) is None and chosen(results, 41 + RESERVE_S) == "third"


def test_a_step_that_was_cut_short_is_given_more_time_and_one_more_try() -> None:
    results = {"first": result(DONE, 10), "second": result(DONE, 50), "third": result(CUT, 100)}
    assert chosen(results, 110) is None and chosen(results, 130) == "third"
    assert chosen({**results, "third": result(CUT, 100, MAX_TRIES)}, 1e6) is None
    assert chosen({**results, "third": result(FAILED, 5, MAX_TRIES)}, 1e6) is None


def test_what_failed_in_this_call_is_left_for_the_next() -> None:
    results = {"first": result(FAILED)}
    assert chosen(results, 1000) == "first", "another call tries it again"
    step = choose(STEPS, results, 1000, {}, {"first"}).step
    assert step is not None and step.id == "third", "what needs it has no point"
    compared = (GpuStep("cell", "", "ab", 10),)
    assert choose(compared, {"cell": result(FAILED)}, 1000, {}, {"cell"}).step is not None


def test_what_a_failed_step_was_for_is_left_out() -> None:
    choice = choose(STEPS, {"first": result(FAILED, 1, MAX_TRIES)}, 1000, {})
    assert choice.step is not None and choice.step.id == "third" and choice.skipped == ("second",)


def test_three_calls_of_a_lease_are_enough_for_what_matters() -> None:
    """By the estimates, with time for writing the models: 30 minutes are lent, less the starts."""
    steps = steps_of(LEASE, "CUDA0", 16, (*POLICIES, "scheinfer"))
    shapes = {shape.name: shape for step in steps for shape in step.models}
    within, seconds = set(), sum(shape.n_bytes for shape in shapes.values()) / 1e9
    for step in steps:
        seconds += step.seconds + RESERVE_S / 3
        within |= {step.id} if seconds < 3 * 570 else set()
    papers = {f"oato-llama3-8b-12l-f16-{share}" for share in (25, 50, 75)}
    papers |= {"scheinfer-mixtral-8x7b-8l-q4_0-12", "scheinfer-llama2-70b-8l-q4_0-12"}
    memory = {f"memory-llama3-8b-{name}" for name in ("32l-q4_0-3g", "32l-q4_0-3g-ub2048", "12l-f16-6g", "12l-f16-12g")}
    assert within >= {"correctness-tokens", "copy-queue", "timeline", "device", *papers, *memory}
    assert sum(shape.n_bytes for shape in shapes.values()) < 50e9


def test_a_first_call_gets_to_the_first_comparison() -> None:
    steps = steps_of(LEASE, "CUDA0", 16, (*POLICIES, "scheinfer"))
    names = [step.id for step in steps]
    before = steps[: names.index("memory-llama3-8b-32l-q4_0-3g") + 1]
    assert {"correctness-split", "copy-queue"} <= {step.id for step in before}
    assert sum(step.seconds for step in before) + LEASE.oato_q4.n_bytes / 1e9 + RESERVE_S < 300


#
# what is kept
#


def test_results_survive_and_are_copied(tmp_path: Path) -> None:
    store = results(tmp_path / "work", copies=(tmp_path / "out",))
    store.begin_call({"budget_s": 1.0})
    store.put("doctor", state=DONE, seconds=2.0)
    store.put("doctor", data=[1])
    assert json.loads((tmp_path / "out" / NAME).read_text()) == json.loads((tmp_path / "work" / NAME).read_text())
    again = results(tmp_path / "work", read_only=True)
    assert again.steps["doctor"] == {"state": DONE, "seconds": 2.0, "data": [1]} and len(again.record["calls"]) == 1


def test_two_at_once_do_not_write_the_same_results(tmp_path: Path) -> None:
    first = results(tmp_path)
    first.put("doctor", state=DONE)
    with pytest.raises(InputError, match="another gpu_run is at work"):
        results(tmp_path)
    assert results(tmp_path, read_only=True).steps == first.steps
    del first
    assert results(tmp_path).steps["doctor"]["state"] == DONE


def test_results_of_another_machine_are_taken_up(tmp_path: Path) -> None:
    results(tmp_path / "there").put("doctor", state=DONE)
    store = results(tmp_path / "here")
    store.adopt(tmp_path / "there" / NAME)
    assert store.steps["doctor"]["state"] == DONE
    store.put("doctor", state=FAILED)
    store.adopt(tmp_path / "there" / NAME)
    assert store.steps["doctor"]["state"] == FAILED, "what is here is newer"


@pytest.mark.parametrize(("device", "scale"), [("Vulkan0", "lease"), ("CUDA0", "small")])
def test_results_of_something_else_are_refused(device: str, scale: str, tmp_path: Path) -> None:
    results(tmp_path).put("doctor", state=DONE)
    with pytest.raises(InputError, match="--work"):
        results(tmp_path, device, scale)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="remove it"):
        results(tmp_path)


def test_a_child_is_stopped_at_its_deadline_and_its_lines_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    script = 'i=0; while :; do echo "{\\"i\\": $i}"; i=$((i + 1)); sleep 0.2; done > "$0"'
    ended = run_child(["sh", "-c", script, str(out)], 8.0, tmp_path / "log.txt")
    assert ended.late and ended.status != 0 and ended.seconds >= 1
    assert json_lines(out)[0] == {"i": 0}


def test_what_a_child_says_last_is_told(tmp_path: Path) -> None:
    script = "import sys; print('result'); sys.exit('it went wrong')"
    ended = run_child([sys.executable, "-c", script], 30.0, tmp_path / "log.txt")
    assert (ended.status, ended.late, ended.out, ended.last_line) == (1, False, "result\n", "it went wrong")


def test_a_half_written_line_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"i": 1}\n{"i": 2', encoding="utf-8")
    assert json_lines(tmp_path / "rows.jsonl") == [{"i": 1}]


#
# what children conclude
#


def test_a_case_in_which_nothing_was_computed_there_is_not_right() -> None:
    good = {"nmse_decode": 0.0, "nmse_prefill": 1e-5, "bytes_in": 8, "bytes_streamed": 0}
    assert verdict(good, "split", 1e-3) == "ok"
    assert verdict({**good, "bytes_in": 0}, "split", 1e-3) == "the device computed nothing"
    assert verdict(good, "stream", 1e-3) == "nothing was streamed"
    assert verdict({**good, "nmse_prefill": 0.1}, "split", 1e-3) == "differs"
    assert verdict({**good, "nmse_prefill": float("nan")}, "split", 1e-3) == "differs"


def test_all_types_and_experts_are_tried() -> None:
    tried = list(cases(list(ALL_TYPES)))
    assert {kind for _, kind in tried} == set(ALL_TYPES) and ("qwen3moe", "Q4_0") in tried
    assert bound("llama", "F32") < bound("llama", "Q4_0") < bound("qwen3moe", "Q4_0") == BOUNDS["experts"]


TRACE = {
    "traceEvents": [
        {"cat": "kernel", "name": "mul_mat", "ts": 110.0, "dur": 40.0, "args": {"stream": 7}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 100.0, "dur": 30.0,
         "args": {"stream": 13, "bytes": 4096}},
        {"cat": "kernel", "name": "quantize", "ts": 145.0, "dur": 15.0, "args": {"stream": 7}},
        {"cat": "cpu_op", "name": "aten::x", "ts": 0.0, "dur": 500.0},
        {"cat": "kernel", "name": "no end", "ts": 0.0},
    ]
}  # fmt: skip


def test_a_trace_tells_how_much_of_the_copies_was_hidden() -> None:
    events = events_of(TRACE)
    assert [event["name"] for event in events] == ["Memcpy HtoD (Pinned -> Device)", "mul_mat", "quantize"]
    assert events[0]["start_us"] == 0 and events[0]["bytes"] == 4096
    assert union([(110, 150), (145, 160)]) == 50, "what overlaps counts once"
    assert overlap_of(events) == {"copy_us": 30, "kernel_us": 50, "both_us": 20, "any_us": 60}


def span(
    step: str, begin_s: float, end_s: float, name: str = "blk.0", n_tokens: int = 1, n_bytes: int = 0
) -> dict[str, Any]:
    return {"step": step, "phase": 0, "name": name, "n_tokens": n_tokens, "bytes": n_bytes, "begin_s": begin_s,
            "end_s": end_s}  # fmt: skip


def test_the_last_token_is_the_last_of_every_phase() -> None:
    token = [span("launch", 0, 1), span("host", 1, 3), span("launch", 3, 4, "blk.1"), span("copy", 3, 5, "blk.1")]
    later = [{**each, "begin_s": each["begin_s"] + 10, "end_s": each["end_s"] + 10} for each in token]
    prompt = [span("launch", -9, -8, n_tokens=64), span("launch", -7, -6, "blk.1")]
    assert last_token([*prompt, *token, *later]) == later
    assert last_token([]) == []


def test_sums_tell_what_ran_beside_what() -> None:
    rows = [span("host", 0, 4), span("resident", 1, 3), span("streamed", 3, 6), span("copy", 2, 5, n_bytes=7),
            span("wait", 4, 6)]  # fmt: skip
    sums = sums_of(rows)
    assert (sums["host_s"], sums["device_s"], sums["copy_s"], sums["span_s"]) == (4, 5, 3, 6)
    assert (sums["copy_beside_device_s"], sums["host_beside_device_s"], sums["bytes_copied"]) == (3, 3, 7)
