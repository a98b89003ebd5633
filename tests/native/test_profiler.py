"""Real profiles of a tiny model, on the CPU and on a local worker, and one that Ctrl-C ends. What becomes of what was
measured: tests/unit/test_profile.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import PATIENCE_S

from oallama.core.errors import DeviceError
from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.profile import Profile
from oallama.core.types import ModelInfo, Operator
from oallama.profile.profiler import profile_model
from oallama.profile.timing import TimingPolicy
from oallama.profile.wanted import STEP_TOKENS

QUICK = TimingPolicy(target=0.5, min_repeats=2, max_repeats=3, warmup_runs=0, time_cap_s=0.02)
TOKENS = (1, 4)
SIZES = {*TOKENS, *(n for n in STEP_TOKENS if TOKENS[0] < n < TOKENS[-1])}
MODEL = ModelInfo(
    path="tiny.gguf", arch="llama", name="tiny", n_layer=1, n_embd=256, n_ff=512, n_head=4, n_head_kv=2,
    n_embd_head_k=64, n_embd_head_v=64, n_expert=4, n_expert_used=2, n_vocab=1000, n_ctx_train=512,
    file_bytes=1, fingerprint="f",
)  # fmt: skip


def operator(role: str, type_name: str, k: int, n: int, layer: int | None = 0, n_expert: int = 1) -> Operator:
    return Operator(
        name=f"blk.0.{role}.weight", layer=layer, role=role, op="MUL_MAT_ID" if n_expert > 1 else "MUL_MAT",
        type=type_name, shape=(k, n, n_expert), bytes=GGML_TYPES_BY_NAME[type_name].n_bytes(k * n * n_expert),
        active_fraction=2 / n_expert if n_expert > 1 else 1.0, n_expert_used=2 if n_expert > 1 else 1,
    )  # fmt: skip


OPERATORS = [
    operator("attn_q", "Q4_0", 256, 256),
    operator("attn_v", "F16", 256, 128),
    operator("ffn_down_exps", "Q4_0", 512, 256, n_expert=4),
    operator("output", "Q6_K", 256, 1000, layer=None),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    return tmp_path


def run(device: str, policy: TimingPolicy = QUICK) -> Profile:
    return profile_model(MODEL, OPERATORS, device, 1, tokens=TOKENS, progress=False, policy=policy)


def test_the_cpu_is_measured_in_each_layout_that_it_has() -> None:
    profile = run("none")
    plain = {(case.mul_mat, case.n_tokens) for case in profile.cases if case.layout == "CPU"}
    assert plain == {(operator.mul_mat, n) for operator in OPERATORS for n in SIZES}
    assert {case.device for case in profile.cases} == {"CPU"} == {profile.device}
    assert {case.layout for case in profile.cases} <= set(profile.fingerprint["cpu_layouts"])
    ways = {(rest.n_tokens, rest.shape.flash_attn) for rest in profile.rest}
    assert ways == {(n_tokens, way) for n_tokens in TOKENS for way in (True, False)}
    for case in profile.cases:
        assert len(case.samples) >= 2 and 0 < min(case.samples) <= case.seconds <= max(case.samples)
        assert min(case.samples) < 1


@pytest.mark.timed
def test_a_worker_is_measured_with_its_link() -> None:
    profile = run("rpc-worker:1")
    assert profile.device == "RPC0" and profile.fingerprint["device_backend"] == "RPC"
    on_device = {(case.mul_mat, case.n_tokens) for case in profile.cases if case.layout == "device"}
    assert on_device == {(operator.mul_mat, n) for operator in OPERATORS for n in SIZES}
    assert {rest.device for rest in profile.rest} == {"CPU", "RPC0"}
    for fit in profile.link.values():
        assert fit.seconds(1 << 24) > fit.seconds(4096) >= 0 and len(fit.points) >= 3
    assert profile.boundary.seconds(1 << 20) > 0 and profile.contention["link_alone_gb_per_s"] > 0
    assert len(profile.sharing) == 3 * len(TOKENS)
    assert 0 <= profile.copy_wait <= 1 and 0 < profile.launch_s < 1 and 0 < profile.launch_issue_s < 1
    assert run("rpc-worker:1") == profile
    assert not [child for child in psutil.Process().children(recursive=True) if child.is_running()]


def test_an_unknown_device_is_named(cache: Path) -> None:
    with pytest.raises(DeviceError, match="CUDA77"):
        run("CUDA77")
    assert list(cache.glob("*.json")) == []


def test_a_profile_that_ctrl_c_ends_goes_on_where_it_was(cache: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_profiler as t\n"
        "from oallama.profile.progress import Progress\n"
        "Progress.finish = lambda self, weight: print(weight, flush=True)\n"
        "try: t.run('none', t.TimingPolicy(min_repeats=5, warmup_runs=0, time_cap_s=0.3, target=0.0))\n"
        "except KeyboardInterrupt: raise SystemExit(130)\n"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    process = subprocess.Popen([sys.executable, "-c", code, *folders], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    (path,) = cache.glob("*.json")
    kept = {tuple(case["samples"]) for case in json.loads(path.read_text())["cases"]}
    assert len(kept) >= 3
    profile = run("none")
    assert kept <= {case.samples for case in profile.cases} and len(kept) < len(profile.cases)
