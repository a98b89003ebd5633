"""Files as earlier versions wrote them are read: profile-v1, history-v1, routing-v1, verdict-v4, and plan_v1 in
tests/unit/test_plan.py. A version that follows keeps its predecessor's sample, or says that it is measured anew (as
verdicts before version 4 are: they were against --fit alone)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oallama.core.codec import from_json, to_json
from oallama.core.errors import ProfileError
from oallama.core.history import Rates
from oallama.core.types import MulMat
from oallama.plan.plan import Plan
from oallama.profile.history import history_path, read_history
from oallama.profile.routing import read_routing, routing_path
from oallama.profile.store import READABLE_VERSIONS, VERSION, profile_from_json, read_profile, write_in_cache
from oallama.tuned.result import Key
from oallama.tuned.store import read_result, result_path

STORED = Path(__file__).parent / "stored"
PROFILE = Path(__file__).parent / "profile-v1.json"
MODEL, MACHINE, TIMINGS = "ab" * 32, "0" * 16, "c" * 16


def kept(name: str, path: Path) -> None:
    """Have the sample in the cache."""
    assert path.name.startswith(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((STORED / f"{name}.json").read_bytes())


def test_a_history_of_version_1() -> None:
    kept("history-v1", history_path(MODEL, MACHINE))
    history = read_history(MODEL, MACHINE, TIMINGS)
    assert (history.decode, history.prompt, history.link) == (Rates(1.5, 1.0), Rates(1.0, 1.25), 2.0)
    assert [(passes.batch, passes.n_passes, passes.total_s) for passes in history.seen] == [(1, 64, 3.5)]


def test_a_routing_of_version_1() -> None:
    kept("routing-v1", routing_path(MODEL))
    routing = read_routing(MODEL, 4, 2)
    assert routing is not None and routing.half_life_tokens == 4096
    assert [(layer.layer, layer.n_tokens, layer.latest) for layer in routing.decode] == [(0, 7, (4, 3, 4, 3))]


def test_a_tune_result_of_version_4() -> None:
    key = from_json(Key, json.loads((STORED / "verdict-v4.json").read_text())["key"], "the key")
    kept("verdict-v4", result_path(key))
    result = read_result(key)
    assert result is not None
    (question,) = result.classes
    assert question.won is not None and question.won.policy == "split" and question.rival == 1
    assert isinstance(result.plan(question.plan), Plan) and question.tries[1].placement.options.no_host
    document = json.loads(json.dumps(question.document))
    assert (document["winner"], document["settled"]) == ("split", True) and document["races"][0]["standing"] == "won"


def test_a_profile_of_version_1_measured_over_a_local_worker() -> None:
    profile = read_profile(PROFILE)
    assert (profile.version, profile.device, profile.fingerprint["device_spec"]) == (1, "RPC0", "rpc-worker:1")
    assert {(c.device, c.layout) for c in profile.cases} == {("CPU", "CPU"), ("CPU", "CPU_REPACK"), ("RPC0", "device")}
    assert {c.mul_mat for c in profile.cases} == {
        MulMat(op="MUL_MAT", type="Q4_0", shape=(256, 256, 1), n_expert_used=1),
        MulMat(op="MUL_MAT_ID", type="Q4_0", shape=(512, 256, 4), n_expert_used=2),
    }
    first = profile.cases[0]
    assert first.samples == (5.9521110718681785e-06, 4.329666656606908e-06, 4.396555545503765e-06)
    assert first.seconds == 4.396555545503765e-06 and first.mul_mat.bytes == 256 * 256 * 18 // 32 == 36864
    assert first.gb_per_s == pytest.approx(36864 / first.seconds / 1e9)
    assert first.gflops == pytest.approx(2 * 256 * 256 / first.seconds / 1e9)
    assert {(rest.device, rest.n_tokens, rest.n_kv) for rest in profile.rest} == {
        (device, 1, n_kv) for device in ("CPU", "RPC0") for n_kv in (256, 1024)
    }
    assert set(profile.link) == {"h2d_pinned", "h2d_pageable", "d2h"}
    assert all([size for size, _ in fit.points] == [4096 * 4**i for i in range(7)] for fit in profile.link.values())
    assert profile.boundary is not None and len(profile.boundary.points) == 4
    assert profile.contention == json.loads(PROFILE.read_text())["contention"] and profile.copy_wait is None


def test_a_profile_of_version_1_is_written_back_byte_for_byte_and_later_versions_are_refused(tmp_path: Path) -> None:
    assert [PROFILE.with_name(f"profile-v{version}.json") for version in READABLE_VERSIONS] == [PROFILE]
    profile = read_profile(PROFILE)
    assert profile_from_json(to_json(profile)) == profile
    write_in_cache(tmp_path / "again.json", profile)
    assert (tmp_path / "again.json").read_bytes() == PROFILE.read_bytes()
    with pytest.raises(ProfileError, match=f"unknown profile version {VERSION + 1}"):
        profile_from_json({**json.loads(PROFILE.read_text()), "version": VERSION + 1})
