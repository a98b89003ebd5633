"""Profiles as files: as JSON and back, what is none, and what leaves when one is given away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from worlds import World

from oallama.cli import profile as cli
from oallama.core.codec import to_json
from oallama.core.errors import ProfileError
from oallama.core.profile import SkippedCase
from oallama.core.types import MulMat
from oallama.placer import Placer
from oallama.profile.export import HIDDEN, exported
from oallama.profile.store import profile_from_json, read_profile

SECRET = "xyzzy"
FINGERPRINT: dict[str, Any] = {
    "cpu": "Intel(R) Xeon(R) Platinum 8480C", "cpu_features": ["avx2", "amx_tile"], "n_threads": 8,
    "memory_bytes": 2**37, "system": f"Linux 6.18.44-{SECRET}", "device_spec": f"rpc://{SECRET}.lan:50052",
    "device_description": f"{SECRET}.lan:50052",
    "measured_at": "2026-11-21T06:06:26Z", "home": f"/home/{SECRET}", "serial": SECRET,
    "policy": {"target": 0.02, "note": SECRET},
}  # fmt: skip
LEFT_OUT = SkippedCase(
    device="CPU", layout="AMX", mul_mat=MulMat(op="MUL_MAT", type="Q4_0", shape=(64, 64, 1)), n_tokens=1,
    working_set_bytes=0, reason=rf"died: C:\Users\{SECRET}\ggml.c:12 assert",
)  # fmt: skip
PROFILE = replace(
    World().profile,
    fingerprint=FINGERPRINT,
    warnings=(
        f"/home/{SECRET}/models/a.gguf was slow at 12.5 GB/s",
        f"{SECRET}-pc answered from 192.168.1.20:50052, {SECRET.upper()} said; use --refresh",
    ),
    skipped=(LEFT_OUT,),
)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cases",), {}, "profile: cases must be a list"),
        (("cases", 0, "seconds"), 0, r"cases\[0\]: seconds must be above 0"),
        (("cases", 0, "n_tokens"), 0, r"cases\[0\]: n_tokens must be above 0"),
        (("rest", 0, "n_tokens"), 0, r"rest\[0\]: n_tokens must be above 0"),
        (("sharing", 0, "n_tokens"), 0, r"sharing\[0\]: n_tokens must be above 0"),
        (("cases", 0, "samples"), [], r"cases\[0\]: samples must be a non-empty list"),
        (("cases", 0, "shape"), [64, 0, 1], r"cases\[0\]: shape\[1\] must be above 0"),
        (("rest", 0, "n_head"), "2", r"rest\[0\]: n_head must be a whole number"),
        (("link", "d2h", "alpha_s"), -1, "link.d2h: alpha_s must be at least 0"),
        (("link", "d2h", "points"), [[1]], r"link.d2h: points\[0\] must be a list of 2 values"),
        (("device",), 5, "profile: device must be a string"),
        (("sharing", 0, "second"), "disk", r"sharing\[0\]: second must be one of cpu, device, link"),
        (("sharing", 0, "first_alone_gb_per_s"), 0, r"sharing\[0\]: first_alone_gb_per_s must be above 0"),
        (("copy_wait",), "long", "profile: copy_wait must be a number"),
    ],
)
def test_faults_are_named(path: tuple[Any, ...], value: object, message: str) -> None:
    record = json.loads(json.dumps(to_json(PROFILE)))
    inner: Any = record
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(ProfileError, match=message):
        profile_from_json(record)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff\xfe", b'{"version": 1, "launch_s": NaN}', b"[" * 99999])
def test_a_file_that_is_no_profile_is_one_sentence(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    with pytest.raises(ProfileError) as error:
        read_profile(path)
    assert str(path) in str(error.value) and "--refresh" in str(error.value)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


#
# given away
#


def test_nothing_personal_leaves() -> None:
    text = json.dumps(exported(PROFILE), ensure_ascii=False)
    assert SECRET not in text.lower()
    assert "192.168" not in text and "/home" not in text and "50052" not in text


@pytest.mark.parametrize(
    ("description", "leaves"),
    [("NVIDIA H100", "NVIDIA H100"), ("box.lan:50052", HIDDEN), ("127.0.0.1:9", HIDDEN)],
)
def test_a_device_s_description_says_what_it_is_and_not_where(description: str, leaves: str) -> None:
    one = replace(PROFILE, fingerprint=FINGERPRINT | {"device_description": description})
    assert exported(one)["fingerprint"]["device_description"] == leaves


def test_a_profile_is_given_away_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placer, "profile", lambda self, *asked, **options: PROFILE)
    model = next(Path(__file__).resolve().parents[2].glob("models/*q4_0.gguf"))
    done = CliRunner().invoke(cli.command, [str(model), "--device", "none", "--export", str(tmp_path / "mine.json")])
    assert done.exit_code == 0, done.output
    assert read_profile(tmp_path / "mine.json") == profile_from_json(exported(PROFILE))
