"""A profile as JSON and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oallama.core.errors import ProfileError
from oallama.core.profile import LinearFit, Profile, ProfileCase, RestCase, RestShape, Sharing
from oallama.core.types import MulMat
from oallama.profile.store import profile_from_json, profile_to_json, read_profile


def small() -> dict[str, Any]:
    case = ProfileCase("CPU", "CPU", MulMat("MUL_MAT", "F16", (64, 32, 1)), 1, 8192, 0.001, (0.001, 0.002))
    shape = RestShape(64, 2, 1, 32, 32, 128, True)
    profile = Profile(
        version=1,
        fingerprint={"cpu": "x"},
        device="CUDA0",
        cases=(case,),
        rest=(RestCase("CPU", 1, 256, 0.001, (0.001,), shape),),
        link={"d2h": LinearFit(1e-6, 1e-10, 0.99, ((4096, 1e-6),))},
        boundary=None,
        launch_s=1e-5,
        warnings=("w",),
        sharing=(
            Sharing("device", "link", 1, 50.0, 20.0, 40.0, 15.0),
            Sharing("cpu", "link", 1, 10.0, 20.0, 8.0, 15.0),
        ),
        copy_wait=0.25,
        launch_issue_s=2e-6,
    )
    return profile_to_json(profile)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cases",), {}, "profile: cases must be a list"),
        (("cases", 0, "seconds"), 0, r"cases\[0\]: seconds must be above 0"),
        (("cases", 0, "n_tokens"), 0, r"cases\[0\]: n_tokens must be above 0"),
        (("rest", 0, "n_tokens"), 0, r"rest\[0\]: n_tokens must be above 0"),
        (("sharing", 0, "n_tokens"), 0, r"sharing\[0\]: n_tokens must be above 0"),
        (("cases", 0, "samples"), [], r"cases\[0\]: samples must be a list with something in it"),
        (("cases", 0, "shape"), [64, 0, 1], r"cases\[0\]: shape must be three sizes"),
        (("rest", 0, "n_head"), "2", r"rest\[0\]: n_head must be a whole number"),
        (("link", "d2h", "alpha_s"), -1, "link.d2h: alpha_s must be at least 0"),
        (("link", "d2h", "points"), [[1]], r"link.d2h: points must be pairs"),
        (("device",), 5, "profile: device must be text"),
        (("sharing", 0, "second"), "disk", r"sharing\[0\]: second must be one of cpu, device, link"),
        (("sharing", 0, "first_alone_gb_per_s"), 0, r"sharing\[0\]: first_alone_gb_per_s must be above 0"),
        (("copy_wait",), "long", "profile: copy_wait must be a number"),
    ],
)
def test_faults_are_named(path: tuple[Any, ...], value: object, message: str) -> None:
    record = small()
    inner: Any = record
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(ProfileError, match=message):
        profile_from_json(record)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": 1, "launch_s": NaN}', b"[" * 99999]
)
def test_a_file_that_is_no_profile_is_one_sentence(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    with pytest.raises(ProfileError) as error:
        read_profile(path)
    assert str(path) in str(error.value) and "--refresh" in str(error.value)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_an_old_file_s_contention_stands_for_decode_and_is_not_written_as_measured() -> None:
    old = small()
    del old["sharing"]
    profile = profile_from_json(old)
    assert profile.sharing == (
        Sharing("cpu", "link", 1, 10.0, 20.0, 8.0, 15.0, assumed=True),
        Sharing("cpu", "link", 32, 10.0, 20.0, 10.0, 20.0, assumed=True),
    )
    assert profile_to_json(profile) == old
