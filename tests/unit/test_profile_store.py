"""A profile as JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import ProfileError
from oallama.core.profile import LinearFit, Profile, ProfileCase, RestCase, RestShape, Sharing, SkippedCase
from oallama.core.types import MulMat
from oallama.profile.store import profile_from_json, profile_to_json, read_profile

seconds = st.floats(1e-9, 1e3)
samples = st.lists(seconds, min_size=1, max_size=4).map(tuple)
names = st.text(min_size=1, max_size=8)
counts = st.integers(0, 2**50)
batches = st.integers(1, 2**50)
shapes = st.tuples(*[st.integers(1, 2**31)] * 3)
mul_mats = st.builds(
    MulMat, st.sampled_from(["MUL_MAT", "MUL_MAT_ID"]), st.sampled_from(["F16", "Q4_0", "Q6_K"]), shapes, counts
)
cases = st.builds(ProfileCase, names, names, mul_mats, batches, counts, seconds, samples)
skipped = st.builds(SkippedCase, names, names, mul_mats, batches, counts, names)
kv_types = st.sampled_from(["f16", "q8_0"])
rest_shapes = st.builds(RestShape, *[counts] * 6, st.booleans(), kv_types, kv_types)
rest = st.builds(RestCase, names, batches, counts, seconds, samples, st.none() | rest_shapes)
fits = st.builds(
    LinearFit, seconds, seconds, st.floats(-10, 1), st.lists(st.tuples(counts, seconds), max_size=3).map(tuple)
)
workers = st.sampled_from(["cpu", "device", "link"])
above_zero = st.floats(1e-9, 1e6)
sharing = st.builds(Sharing, workers, workers, batches, above_zero, above_zero, seconds, seconds)
profiles = st.builds(
    Profile,
    version=st.just(1),
    fingerprint=st.dictionaries(names, st.none() | names | counts | st.lists(names, max_size=2), max_size=3),
    device=names,
    cases=st.lists(cases, max_size=3).map(tuple),
    rest=st.lists(rest, max_size=3).map(tuple),
    link=st.dictionaries(names, fits, max_size=3),
    boundary=st.none() | fits,
    launch_s=seconds,
    warnings=st.lists(names, max_size=2).map(tuple),
    skipped=st.lists(skipped, max_size=2).map(tuple),
    sharing=st.lists(sharing, max_size=2).map(tuple),
    copy_wait=st.none() | st.floats(0, 1),
    launch_issue_s=st.none() | seconds,
)


@given(profiles)
def test_json_gives_back_the_same_profile(profile: Profile) -> None:
    text = json.dumps(profile_to_json(profile), allow_nan=False)
    assert profile_from_json(json.loads(text)) == profile


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
        (("cases", 0), 5, r"profile.cases\[0\] must be an object"),
        (("cases", 0, "seconds"), 0, r"cases\[0\]: seconds must be above 0"),
        (("cases", 0, "seconds"), "fast", r"cases\[0\]: seconds must be a number"),
        (("cases", 0, "seconds"), float("nan"), r"cases\[0\]: seconds must be a number"),
        (("cases", 0, "seconds"), 10**400, r"cases\[0\]: seconds must be a number"),
        (("cases", 0, "n_tokens"), True, r"cases\[0\]: n_tokens must be a whole number"),
        (("cases", 0, "n_tokens"), -1, r"cases\[0\]: n_tokens must be above 0"),
        (("cases", 0, "n_tokens"), 0, r"cases\[0\]: n_tokens must be above 0"),
        (("rest", 0, "n_tokens"), 0, r"rest\[0\]: n_tokens must be above 0"),
        (("sharing", 0, "n_tokens"), 0, r"sharing\[0\]: n_tokens must be above 0"),
        (("cases", 0, "samples"), [], r"cases\[0\]: samples must be a list with something in it"),
        (("cases", 0, "shape"), [64, 32], r"cases\[0\]: shape must be three sizes"),
        (("cases", 0, "shape"), [64, 0, 1], r"cases\[0\]: shape must be three sizes"),
        (("rest", 0, "n_head"), "2", r"rest\[0\]: n_head must be a whole number"),
        (("link", "d2h"), [], "profile.link.d2h must be an object"),
        (("link", "d2h", "alpha_s"), -1, "link.d2h: alpha_s must be at least 0"),
        (("link", "d2h", "points"), [[1]], r"link.d2h: points must be pairs"),
        (("launch_s",), None, "profile: launch_s must be a number"),
        (("device",), 5, "profile: device must be text"),
        (("sharing",), {}, "profile: sharing must be a list"),
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
    "name", sorted(set(small()) - {"boundary", "contention", "sharing", "copy_wait", "launch_issue_s"})
)
def test_a_missing_key_is_named(name: str) -> None:
    record = small()
    del record[name]
    with pytest.raises(ProfileError, match=name):
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


def test_contention_is_the_row_of_cpu_and_link_at_the_smallest_batch() -> None:
    record = small()
    rates = {"cpu_alone_gb_per_s": 10.0, "link_alone_gb_per_s": 20.0, "cpu_with_link_gb_per_s": 8.0,
             "link_with_cpu_gb_per_s": 15.0}  # fmt: skip
    assert record["contention"] == rates
    profile = profile_from_json(record)
    larger = replace(profile.sharing[1], n_tokens=32, first_with_second_gb_per_s=9.0)
    assert profile_to_json(replace(profile, sharing=(larger, *profile.sharing)))["contention"] == rates
    assert profile_to_json(replace(profile, sharing=profile.sharing[:1]))["contention"] is None


def test_an_old_file_s_contention_stands_for_decode_and_is_not_written_as_measured() -> None:
    old = small()
    del old["sharing"]
    profile = profile_from_json(old)
    assert profile.sharing == (
        Sharing("cpu", "link", 1, 10.0, 20.0, 8.0, 15.0, assumed=True),
        Sharing("cpu", "link", 32, 10.0, 20.0, 10.0, 20.0, assumed=True),
    )
    assert profile_to_json(profile) == old
