"""Real profiles of a tiny model, on the CPU and on a local worker: measured, cached, interrupted, lost, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from processes import PATIENCE_S, children_with, until

from oallama.core.errors import DeviceError
from oallama.core.profile import Profile
from oallama.core.types import ModelInfo, Operator
from oallama.profile.profiler import profile_model
from oallama.profile.store import profile_from_json, profile_to_json, read_profile
from oallama.profile.timing import Policy

QUICK = Policy(target=0.5, min_repeats=2, max_repeats=3, warmup_runs=0, time_cap_s=0.02)
TOKENS = (1, 4)
WORKER = "rpc-worker:1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    return tmp_path


def model() -> ModelInfo:
    return ModelInfo(
        path="tiny.gguf", arch="llama", name="tiny", n_layer=1, n_embd=256, n_ff=512, n_head=4, n_head_kv=2,
        n_embd_head_k=64, n_embd_head_v=64, n_expert=4, n_expert_used=2, n_vocab=1000, n_ctx_train=512,
        file_bytes=1, fingerprint="f",
    )  # fmt: skip


OPERATORS = [
    Operator("blk.0.attn_q.weight", 0, "attn_q", "MUL_MAT", "Q4_0", (256, 256, 1), 36864, 1.0),
    Operator("blk.0.attn_v.weight", 0, "attn_v", "MUL_MAT", "F16", (256, 128, 1), 65536, 1.0),
    Operator("blk.0.ffn_down_exps.weight", 0, "ffn_down_exps", "MUL_MAT_ID", "Q4_0", (512, 256, 4), 294912, 0.5, 2),
    Operator("output.weight", None, "output", "MUL_MAT", "Q6_K", (256, 1000, 1), 210000, 1.0),
]


def run(device: str, operators: list[Operator] = OPERATORS, **options: object) -> Profile:
    arguments = {"tokens": TOKENS, "progress": False, "policy": QUICK, **options}
    return profile_model(model(), operators, device, 1, **arguments)  # type: ignore[arg-type]


def journal(cache: Path) -> list[dict[str, object]]:
    """What is written whole."""
    lines = [line for path in cache.glob("*.journal") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.strip() and line.endswith("\n")]


def journalled_cases(cache: Path) -> list[dict[str, object]]:
    return [case for fragment in journal(cache) for case in fragment.get("cases", [])]  # type: ignore[attr-defined]


def test_cpu_profile_is_complete_and_comes_from_the_cache_the_second_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = run("none")
    plain = {(c.mul_mat, c.n_tokens) for c in profile.cases if c.layout == "CPU"}
    assert plain == {(o.mul_mat, n) for o in OPERATORS for n in TOKENS}
    assert {case.device for case in profile.cases} == {"CPU"} == {profile.device}
    ways = {(rest.device, rest.n_tokens, rest.shape.flash_attn) for rest in profile.rest if rest.shape is not None}
    assert ways == {("CPU", n_tokens, way) for n_tokens in (1, 4) for way in (True, False)}
    assert profile.link == {} and profile.boundary is None and profile.contention is None and profile.launch_s == 0
    for case in profile.cases:
        assert len(case.samples) >= 2 and min(case.samples) <= case.seconds <= max(case.samples)
        assert 0 < min(case.samples) < 1
    extra = set(profile.fingerprint["cpu_layouts"]) - {"CPU"}
    assert {case.layout for case in profile.cases} - {"CPU"} <= extra
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile

    assert journal(cache) == []
    before = [path.stat().st_mtime_ns for path in cache.glob("*.json")]
    with monkeypatch.context() as nothing_starts:
        nothing_starts.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nothing is left to be measured"))
        assert run("none") == profile  # the very samples
    assert [path.stat().st_mtime_ns for path in cache.glob("*.json")] == before
    refreshed = run("none", refresh=True)
    assert [c.samples for c in refreshed.cases] != [c.samples for c in profile.cases]


def test_a_second_model_adds_only_what_is_new(cache: Path) -> None:
    first = run("none", OPERATORS[:2])
    both = run("none", OPERATORS)
    kept = {(c.layout, c.mul_mat, c.n_tokens, c.working_set_bytes): c.samples for c in both.cases}
    stored = read_profile(next(cache.glob("*.json")))
    assert set(first.cases) <= set(stored.cases)
    assert len(kept) == len(both.cases) and {c.mul_mat for c in both.cases} == {o.mul_mat for o in OPERATORS}
    assert run("none", OPERATORS[:2]).cases == first.cases


def test_worker_profile_has_device_cases_link_boundary_and_contention(cache: Path) -> None:
    profile = run(WORKER)
    assert profile.device == "RPC0"
    assert profile.fingerprint["device_backend"] == "RPC"
    on_device = {(c.mul_mat, c.n_tokens) for c in profile.cases if (c.device, c.layout) == ("RPC0", "device")}
    assert on_device == {(o.mul_mat, n) for o in OPERATORS for n in TOKENS}
    assert {rest.device for rest in profile.rest} == {"CPU", "RPC0"}
    assert set(profile.link) == {"h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h", "issue_pinned", "issue_pageable"}
    for fit in profile.link.values():
        assert fit.seconds(1 << 24) > fit.seconds(4096) >= 0
        assert len(fit.points) >= 3
    assert profile.boundary is not None and profile.boundary.seconds(1 << 20) > 0
    assert profile.contention is not None and profile.contention.second_alone_gb_per_s > 0
    assert {(s.first, s.second) for s in profile.sharing} == {
        ("cpu", "device"), ("cpu", "link"), ("device", "link")
    }  # fmt: skip
    assert {s.n_tokens for s in profile.sharing} == {n for n in TOKENS if n < 64}
    assert profile.copy_wait is not None and 0 <= profile.copy_wait <= 1
    assert 0 < profile.launch_s < 1 and profile.launch_issue_s is not None and 0 < profile.launch_issue_s < 1
    assert run(WORKER) == profile
    assert not [child for child in psutil.Process().children(recursive=True) if child.is_running()]


@pytest.mark.thorough
def test_a_pair_of_cpu_backends_can_be_profiled() -> None:
    profile = run("cpu-pair", OPERATORS[:1])
    assert profile.device == "cpu-pair"
    assert {(c.device, c.layout) for c in profile.cases} >= {("CPU", "CPU"), ("cpu-pair", "device")}
    assert profile.launch_s > 0 and profile.boundary is None


def test_an_unknown_device_is_named(cache: Path) -> None:
    with pytest.raises(DeviceError, match="CUDA77"):
        run("CUDA77")
    assert list(cache.glob("*.json")) == []


def test_an_interrupted_profile_goes_on_where_it_was(cache: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_profiler as t\n"
        "try: t.run('none', policy=t.Policy(min_repeats=5, warmup_runs=0, time_cap_s=0.3, target=0.0))\n"
        "except KeyboardInterrupt: raise SystemExit(130)\n"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    process = subprocess.Popen([sys.executable, "-c", code, *folders], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: len(journalled_cases(cache)) >= 3 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    assert out == b""
    kept = journalled_cases(cache)
    assert len(kept) >= 3 and list(cache.glob("*.json")) == []

    profile = run("none")
    samples = {(c.layout, c.mul_mat.type, c.mul_mat.shape, c.n_tokens): list(c.samples) for c in profile.cases}
    for case in kept:
        key = (case["layout"], case["type"], tuple(case["shape"]), case["n_tokens"])  # type: ignore[arg-type]
        assert samples[key] == case["samples"]  # type: ignore[index]
    assert len(samples) > len(kept)
    assert journal(cache) == []


def test_an_interrupted_refresh_is_finished_by_the_next_call(cache: Path) -> None:
    old = run("none", OPERATORS[:1])
    path = next(cache.glob("*.json"))
    path.with_suffix(".journal").write_text('{"restart": true}\n')
    new = run("none", OPERATORS[:1])
    assert [c.samples for c in new.cases] != [c.samples for c in old.cases]
    assert journal(cache) == []


def test_a_lost_worker_is_a_device_error_and_costs_only_what_was_under_way(cache: Path) -> None:
    def kill_worker() -> None:
        until(lambda: len(journalled_cases(cache)) >= 2)
        for child in children_with("ggml_bridge.rpc_server"):
            child.kill()

    killer = threading.Thread(target=kill_worker)
    killer.start()
    slow = Policy(min_repeats=5, max_repeats=10**6, warmup_runs=0, time_cap_s=0.1, target=0.0)
    with pytest.raises(DeviceError) as error:
        run(WORKER, OPERATORS[:2], policy=slow)
    killer.join()
    assert "rpc-worker:1" in str(error.value) and "again" in str(error.value)
    kept = journalled_cases(cache)
    assert len(kept) >= 2
    profile = run(WORKER, OPERATORS[:2])
    assert {tuple(case["samples"]) for case in kept} <= {c.samples for c in profile.cases}  # type: ignore[arg-type]


def test_a_damaged_cache_is_measured_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("none", OPERATORS[:1])
    path = next(cache.glob("*.json"))
    path.write_text("{")
    profile = run("none", OPERATORS[:1], progress=True)
    assert profile.cases and read_profile(path).cases
    captured = capsys.readouterr()
    assert captured.out == "" and "measured again" in captured.err


def test_two_processes_measure_one_after_the_other(cache: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_profiler as t\n"
        "print(sorted(c.samples for c in t.run('none', t.OPERATORS[:1]).cases))\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(Path(__file__).parents[1])]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert outputs[0] == outputs[1] != ""
