"""A profile of format 1, measured once over a local worker, stays readable and is written back byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oallama.core.errors import ProfileError
from oallama.core.types import MulMat
from oallama.profile.store import READABLE_VERSIONS, VERSION, profile_from_json, profile_to_json, read_profile, save

SAMPLE = Path(__file__).parent / "profile-v1.json"


def test_what_the_sample_says_is_what_is_read() -> None:
    profile = read_profile(SAMPLE)
    assert (profile.version, profile.device, profile.fingerprint["device_spec"]) == (1, "RPC0", "rpc-worker:1")
    assert {(c.device, c.layout) for c in profile.cases} == {("CPU", "CPU"), ("CPU", "CPU_REPACK"), ("RPC0", "device")}
    assert {c.mul_mat for c in profile.cases} == {
        MulMat(op="MUL_MAT", type="Q4_0", shape=(256, 256, 1), n_expert_used=1),
        MulMat(op="MUL_MAT_ID", type="Q4_0", shape=(512, 256, 4), n_expert_used=2),
    }
    first = profile.cases[0]
    assert first.samples == (5.9521110718681785e-06, 4.329666656606908e-06, 4.396555545503765e-06)
    assert first.seconds == 4.396555545503765e-06
    assert first.gb_per_s == pytest.approx(36864 / first.seconds / 1e9)
    assert first.gflops == pytest.approx(2 * 256 * 256 / first.seconds / 1e9)
    assert {(rest.device, rest.n_tokens, rest.n_kv) for rest in profile.rest} == {
        (device, 1, n_kv) for device in ("CPU", "RPC0") for n_kv in (256, 1024)
    }
    assert all(rest.shape is not None and rest.shape.n_head_kv == 2 for rest in profile.rest)
    assert set(profile.link) == {"h2d_pinned", "h2d_pageable", "d2h"}
    assert all([size for size, _ in fit.points] == [4096 * 4**i for i in range(7)] for fit in profile.link.values())
    assert profile.boundary is not None and len(profile.boundary.points) == 4
    assert profile.contention is not None and profile.contention.first_alone_gb_per_s > 0
    assert profile.skipped[0].reason == "2.6 times slower than CPU_REPACK at 32 tokens"
    assert len(profile.warnings) == 1
    assert all(one.assumed for one in profile.sharing) and profile.copy_wait is None, "it has `contention` alone"


def test_the_sample_is_written_back_byte_for_byte(tmp_path: Path) -> None:
    profile = read_profile(SAMPLE)
    assert profile_from_json(profile_to_json(profile)) == profile
    save(tmp_path / "again.json", profile)
    assert (tmp_path / "again.json").read_bytes() == SAMPLE.read_bytes()


def test_weights_of_stored_cases_are_those_of_ggml_s_blocks() -> None:
    block = 18 / 32  # bytes per Q4_0 weight
    for record in read_profile(SAMPLE).cases:
        k, n, e = record.mul_mat.shape
        assert record.mul_mat.bytes == k * n * e * block


def test_every_readable_version_has_a_sample_and_the_next_is_refused() -> None:
    assert [Path(__file__).parent / f"profile-v{version}.json" for version in READABLE_VERSIONS] == [SAMPLE]
    later = json.loads(SAMPLE.read_text())
    later["version"] = VERSION + 1
    with pytest.raises(ProfileError, match=f"version {VERSION + 1} is not known"):
        profile_from_json(later)
