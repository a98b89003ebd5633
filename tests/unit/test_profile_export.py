"""A profile that is given away names nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama.core.profile import LinearFit, Profile, ProfileCase, Sharing, SkippedCase
from oallama.core.types import MulMat
from oallama.profile.export import HIDDEN, exported
from oallama.profile.store import profile_from_json, read_profile

SECRET = "xyzzy"
FINGERPRINT: dict[str, Any] = {
    "cpu": "Intel(R) Xeon(R) Platinum 8480C", "cpu_features": ["avx2", "amx_tile"], "n_threads": 8,
    "memory_bytes": 2**37, "system": f"Linux 6.18.44-{SECRET}", "device_spec": f"rpc://{SECRET}.lan:50052",
    "gpus": ["0000:01:00.0 NVIDIA H100", "0x10de:0x2330"], "gpu_driver": "nvidia 580.159.04",
    "gpu_environment": {"CUDA_VISIBLE_DEVICES": f"GPU-{SECRET}"}, "device_description": f"worker on 127.0.0.1:{SECRET}",
    "measured_at": "2026-11-21T06:06:26Z", "home": f"/home/{SECRET}", "serial": SECRET,
    "policy": {"target": 0.02, "note": SECRET},
}  # fmt: skip
SMALL = MulMat("MUL_MAT", "Q4_0", (64, 64, 1))
CASE = ProfileCase("CUDA0", "device", MulMat("MUL_MAT", "Q4_0", (4096, 14336, 1)), 1, 0, 2e-5, (2e-5, 2.1e-5))
PROFILE = Profile(
    version=1,
    fingerprint=FINGERPRINT,
    device="CUDA0",
    cases=(CASE,),
    rest=(),
    link={"h2d_pinned": LinearFit(1e-5, 2e-11, 0.99, ((4096, 1e-5),))},
    boundary=None,
    launch_s=1e-5,
    warnings=(
        f"/home/{SECRET}/models/a.gguf was slow at 12.5 GB/s",
        f"{SECRET}-pc answered from 192.168.1.20:50052, {SECRET.upper()} said; use --refresh",
    ),
    sharing=(Sharing("device", "link", 1, 50.0, 20.0, 40.0, 15.0),),
    copy_wait=0.25,
    launch_issue_s=2e-6,
    skipped=(SkippedCase("CPU", "AMX", SMALL, 1, 0, rf"died: C:\Users\{SECRET}\ggml.c:12 assert"),),
)  # fmt: skip


def test_nothing_personal_leaves() -> None:
    text = json.dumps(exported(PROFILE), ensure_ascii=False)
    assert SECRET not in text.lower()
    assert "192.168" not in text and "/home" not in text and "50052" not in text


@pytest.mark.parametrize(
    ("description", "leaves"),
    [("NVIDIA H100", "NVIDIA H100"), ("worker on box", HIDDEN), ("a card at 127.0.0.1", HIDDEN)],
)
def test_a_device_s_description_says_what_it_is_and_not_where(description: str, leaves: str) -> None:
    one = replace(PROFILE, fingerprint=FINGERPRINT | {"device_description": description})
    assert exported(one)["fingerprint"]["device_description"] == leaves


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from oallama.cli import profile as cli
    from oallama.placer import Placer

    monkeypatch.setattr(Placer, "profile", lambda self, **options: PROFILE)
    model = next(Path(__file__).resolve().parents[2].glob("models/*q4_0.gguf"))
    done = CliRunner().invoke(cli.command, [str(model), "--device", "none", "--export", str(tmp_path / "mine.json")])
    assert done.exit_code == 0, done.output
    assert read_profile(tmp_path / "mine.json") == profile_from_json(exported(PROFILE))
