"""What the measuring process may do to its parent: crash, refuse, and be started again. No native code here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ggml_bridge import BridgeError as NativeError
from ggml_bridge import ChildDied
from ggml_bridge.child import ChildError
from oallama.core.codec import to_json
from oallama.core.errors import BridgeError, DeviceError, OallamaError, ProfileError, UsageError
from oallama.core.profile import Case, Profile, RestShape
from oallama.core.types import ModelInfo, MulMat, Operator
from oallama.device.identity import KnownDevice
from oallama.device.spec import parse_device
from oallama.profile.busy import Others, busy_percent, doubt
from oallama.profile.child import Request
from oallama.profile.link import line_over
from oallama.profile.merge import empty, merged
from oallama.profile.profiler import _Measurement, _resumed, profile_model, stored_profile
from oallama.profile.progress import Progress
from oallama.profile.store import Journal, save
from oallama.profile.timing import Policy
from oallama.profile.wanted import Wanted

PLAIN = MulMat("MUL_MAT", "F16", (64, 32, 1))
BATCHED = MulMat("MUL_MAT", "F16", (64, 32, 4))
WANT = Wanted(((PLAIN, 1, 8192), (BATCHED, 1, 32768)), ((1, 256),), RestShape(64, 2, 1, 32, 32, 128, True), 2)

Send = Callable[[dict[str, Any]], None]
Script = Callable[[Mapping[str, Any], Send], None]


def case_json(layout: str) -> dict[str, Any]:
    return to_json(Case("CPU", layout, PLAIN, 1, 8192).measured([1e-3], 1e-3))


def started(device: str, layout: str, kind: str = "MUL_MAT") -> dict[str, Any]:
    return {"start": f"{device} {layout}", "device": device, "layout": layout, "kind": kind}


def measure(tmp_path: Path, scripts: list[Script], spec: str = "none") -> tuple[Profile, list[Mapping[str, Any]]]:
    """Run a measurement whose children follow the scripts, and give back what they were asked."""
    requests: list[Mapping[str, Any]] = []

    def run_child(module: str, request: Mapping[str, Any], progress: Send) -> dict[str, Any]:
        json.dumps(request)
        requests.append(request)
        scripts[len(requests) - 1](request, progress)
        return {}

    request = Request(spec, 1, WANT, empty({"cpu": "x"}), Policy())
    journal = Journal(tmp_path / "profile.json")
    return _Measurement(request, journal, Progress(False), run_child).run(), requests


def good(request: Mapping[str, Any], send: Send) -> None:
    send({"fragment": {"device": "CPU", "fingerprint": {"device_name": "none"}}})
    send({"weight": 1.0})
    send(started("CPU", "CPU"))
    send({"fragment": {"cases": [case_json("CPU")]}, "done": 1.0})


def crashes(device: str, layout: str, kind: str = "MUL_MAT") -> Script:
    def script(request: Mapping[str, Any], send: Send) -> None:
        good(request, send)
        send(started(device, layout, kind))
        raise ChildDied("oallama.profile.child", -11)

    return script


def test_a_layout_that_crashes_is_left_out_and_named(tmp_path: Path) -> None:
    profile, requests = measure(tmp_path, [crashes("CPU", "AMX"), good])
    assert [list(request["broken_layouts"]) for request in requests] == [[], ["AMX"]]
    assert requests[1]["profile"]["cases"] == [case_json("CPU")]  # the second child goes on where the first one died
    assert profile.fingerprint["broken_layouts"] == ["AMX"]
    (warning,) = profile.warnings
    assert "AMX" in warning and "SIGSEGV" in warning and "rebuild" in warning


def test_a_kernel_for_3d_weights_may_crash_and_its_layout_stays(tmp_path: Path) -> None:
    profile, requests = measure(tmp_path, [crashes("CPU", "AMX", "3-D MUL_MAT"), good])
    assert list(requests[1]["broken_layouts"]) == []
    skipped = requests[1]["profile"]["skipped"]
    assert [(case["layout"], case["shape"]) for case in skipped] == [("AMX", [64, 32, 4])]
    assert "3-D MUL_MAT in the CPU layout AMX crashed" in profile.warnings[0]
    with pytest.raises(ProfileError):
        measure(tmp_path, [crashes("CPU", "CPU", "3-D MUL_MAT")])


def test_a_crash_of_the_plain_layout_is_a_profile_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"measuring CPU CPU ended the process .*run the same command again"):
        measure(tmp_path, [crashes("CPU", "CPU")])
    assert len(Journal(tmp_path / "profile.json").read()) == 2  # what was finished is kept


def test_an_interrupted_measurement_that_cannot_be_used_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    save(path, merged(empty({"cpu": "x"}), [{"cases": [case_json("CPU")]}]))
    journal = Journal(path)

    def layouts() -> set[str]:
        return {case.layout for case in _resumed(path, journal, {"cpu": "x"}, Progress(True)).cases}

    journal.append({"cases": [case_json("AMX")]})
    assert layouts() == {"CPU", "AMX"} and not capsys.readouterr().err
    journal.append({"cases": [{"layout": "CPU"}]})
    assert layouts() == {"CPU"} and journal.read() == []
    assert "an interrupted measurement cannot be used and is made again" in capsys.readouterr().err


def test_a_crash_while_the_device_works_is_a_device_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"the device rpc-worker:1 was lost while measuring RPC0 device"):
        measure(tmp_path, [crashes("RPC0", "device")], spec="rpc-worker:1")


@pytest.mark.parametrize(("spec", "kind"), [("none", ProfileError), ("CUDA0", DeviceError)])
def test_a_crash_before_anything_is_measured(tmp_path: Path, spec: str, kind: type[OallamaError]) -> None:
    def script(request: Mapping[str, Any], send: Send) -> None:
        raise ChildDied("oallama.profile.child", -4)

    with pytest.raises(kind, match="SIGILL"):
        measure(tmp_path, [script], spec)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ChildError("DeviceError", "there is no device 'CUDA7' here"), DeviceError),
        (ChildError("UsageError", "there is no device 'CUDA7' here"), UsageError),
        (ChildError("KeyError", "there is no device 'CUDA7' here"), ProfileError),
        (ValueError("there is no device 'CUDA7' here"), ProfileError),
        (NativeError("there is no device 'CUDA7' here"), BridgeError),
    ],
)
def test_errors_of_the_child_are_ours(tmp_path: Path, raised: Exception, kind: type[OallamaError]) -> None:
    def script(request: Mapping[str, Any], send: Send) -> None:
        raise raised

    with pytest.raises(kind, match="CUDA7") as error:
        measure(tmp_path, [script])
    assert type(error.value) is kind


MODEL = ModelInfo(
    path="m.gguf", arch="llama", name="m", n_layer=1, n_embd=64, n_ff=128, n_head=2, n_head_kv=1, n_embd_head_k=32,
    n_embd_head_v=32, n_expert=0, n_expert_used=0, n_vocab=10, n_ctx_train=64, file_bytes=1,
    fingerprint="f",
)  # fmt: skip
OPERATOR = Operator("a", 0, "attn_q", "MUL_MAT", "F16", (64, 64, 1), 8192, 1.0)


def known(spec: str, description: str = "a card", memory_bytes: int = 12 << 30) -> KnownDevice:
    identity = {"description": description, "backend": "CUDA", "type": "GPU", "memory_bytes": memory_bytes}
    return KnownDevice(parse_device(spec), identity)


def test_only_the_same_device_gets_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    requests: list[Mapping[str, Any]] = []

    def run_child(module: str, request: Mapping[str, Any], progress: Send) -> dict[str, Any]:
        requests.append(json.loads(json.dumps(request)))
        progress({"fragment": {"device": "CUDA0", "cases": [case_json("CPU")]}})
        return {}

    def knows(device: KnownDevice) -> bool:
        """Whether the measurement begins with what an earlier one found."""
        profile_model(MODEL, [OPERATOR], device, 1, progress=False)
        return bool(requests[-1]["profile"]["cases"])

    monkeypatch.setattr("ggml_bridge.child.run_in_child", run_child)
    assert not knows(known("CUDA0"))
    assert knows(known("CUDA0"))
    assert not knows(known("CUDA0", "another card"))
    assert not knows(known("CUDA0", memory_bytes=8 << 30))
    assert not knows(known("CUDA1"))
    assert not knows(KnownDevice(parse_device("CUDA0"))), "nobody knows what it is"
    assert knows(known("CUDA0")), "the first card's profile is still there"


@pytest.mark.parametrize("refresh", [False, True])
def test_what_was_measured_beside_other_programs_serves_only_as_long_as_they_run(
    refresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")
    monkeypatch.setattr("oallama.profile.profiler.others_percent", lambda: now)
    monkeypatch.setattr("oallama.profile.profiler.is_complete", lambda profile, want: bool(profile.cases))
    measured_at: list[float] = []

    def run_child(module: str, request: Mapping[str, Any], progress: Send) -> dict[str, Any]:
        measured_at.append(now)
        progress({"fragment": {"cases": [case_json("CPU")], "fingerprint": {"others_cpu_percent": now}}})
        return {}

    monkeypatch.setattr("ggml_bridge.child.run_in_child", run_child)
    now = 60.0
    found = profile_model(MODEL, [OPERATOR], "none", 1, refresh=refresh)
    assert "60 % of the CPU" in found.warnings[-1]
    now = 45.0
    assert profile_model(MODEL, [OPERATOR], "none", 1) == found, "there is nothing better as long as it is busy"
    assert stored_profile(MODEL, [OPERATOR], parse_device("none"), 1) == found
    now = 3.0
    assert stored_profile(MODEL, [OPERATOR], parse_device("none"), 1) is None
    quiet = profile_model(MODEL, [OPERATOR], "none", 1)
    assert not quiet.warnings and measured_at == [60.0, 3.0]
    now = 70.0
    assert profile_model(MODEL, [OPERATOR], "none", 1) == quiet, "a busy machine does not touch what is known"
    profile_model(MODEL, [OPERATOR], "none", 1, refresh=True)
    now = 2.0
    profile_model(MODEL, [OPERATOR], "none", 1)
    assert measured_at == [60.0, 3.0, 70.0, 2.0], "nor is what a refresh measured then kept for longer"
    assert len(list(tmp_path.glob("profile-*.json"))) == 1


def test_what_a_busy_machine_measured_is_marked_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")
    cases = [case_json("CPU") | {"n_tokens": n} for n in range(1, 41)]

    def said(**fingerprint: Any) -> str:
        return doubt(merged(empty({}), [{"cases": cases, "fingerprint": fingerprint}]))

    assert said() == said(others_cpu_percent=19.0, disturbed=2) == ""
    busy = said(others_cpu_percent=60.0, disturbed=2)
    assert "60 % of the CPU" in busy and "2 of its measurements" in busy and "again once they end" in busy
    late = said(disturbed=3)
    assert "3 of its measurements" in late and "% of" not in late and "--refresh" in late


@pytest.mark.parametrize("said", ["quiet", "-1", "101", "nan"])
def test_a_wrong_share_of_the_cpu_is_named(said: str) -> None:
    with pytest.raises(UsageError, match=f"OALLAMA_BUSY_PERCENT must be a number from 0 to 100, not '{said}'"):
        busy_percent({"OALLAMA_BUSY_PERCENT": said})


def test_a_cache_that_cannot_be_written_costs_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "file" / "cache"))

    def run_child(module: str, request: Mapping[str, Any], progress: Send) -> dict[str, Any]:
        good(request, progress)
        return {}

    monkeypatch.setattr("ggml_bridge.child.run_in_child", run_child)
    for refresh in (False, True):
        found = profile_model(MODEL, [OPERATOR], known("CUDA0"), 1, refresh=refresh)
        assert found.fingerprint["device_name"] == "none", "what was measured is there"
        (note,) = capsys.readouterr().err.splitlines()
        assert "OALLAMA_CACHE_DIR" in note and "this run alone" in note


def test_a_slow_link_is_spared_large_messages_but_has_a_line() -> None:
    asked: list[int] = []

    def seconds_of(size: int) -> float:
        asked.append(size)
        return size * 1e-3

    fit = line_over((1, 10, 100, 1000, 10000), seconds_of, slow_s=0.005)
    assert asked == [1, 10, 100]
    assert fit.beta_s_per_byte == pytest.approx(1e-3)
    line_over((1, 10, 100, 1000, 10000), seconds_of, slow_s=0.5)
    assert asked[3:] == [1, 10, 100, 1000]


def test_other_programs_are_looked_for_now_and_then() -> None:
    percents, times = iter([80.0, 4.0, 6.0]), iter([0.0, 0.0, 4.9, 5.0, 5.0, 20.0, 20.0])
    others = Others(lambda: next(percents), lambda: next(times))
    assert [others.looked() for _ in range(4)] == [80.0, None, 42.0, 6.0]


def test_bad_requests_are_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="--tokens"):
        profile_model(MODEL, [OPERATOR], "none", 1, tokens=())
    with pytest.raises(UsageError, match="--tokens"):
        profile_model(MODEL, [OPERATOR], "none", 1, tokens=(0, 32))
    with pytest.raises(UsageError, match="--threads"):
        profile_model(MODEL, [OPERATOR], "none", 0)
    with pytest.raises(UsageError, match="--device"):
        profile_model(MODEL, [OPERATOR], "rpc://nowhere", 1)
    with pytest.raises(ProfileError, match=r"m\.gguf has no weights"):
        profile_model(MODEL, [], "none", 1)
