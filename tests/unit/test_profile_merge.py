"""A store that grows model by model, seen from one model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oallama.core.profile import LinearFit, Profile, RestCase, RestShape, Sharing
from oallama.core.types import MulMat
from oallama.profile.merge import (
    LINKS,
    PAIRS,
    empty,
    is_complete,
    missing_cases,
    missing_link,
    missing_rest,
    missing_sharing,
    select,
    still_valid,
)
from oallama.profile.wanted import Wanted, cases_at, required, rest_skipped

SHAPE = RestShape(n_embd=64, n_head=2, n_head_kv=1, n_embd_head_k=32, n_embd_head_v=32, n_ff=128, flash_attn=True)
PLAIN = replace(SHAPE, flash_attn=False)
LINE = LinearFit(alpha_s=1e-6, beta_s_per_byte=1e-10, r2=1.0)


def want(*shapes: tuple[int, int, int], tokens: tuple[int, ...] = (1, 32), size: int = 1 << 20) -> Wanted:
    mul_mats = tuple((MulMat(op="MUL_MAT", type="F16", shape=s), n, size) for s in shapes for n in tokens)
    return Wanted(mul_mats, tuple((n, 256) for n in tokens), SHAPE, 2)


def measured(wanted: Wanted, device: str | None = None) -> Profile:
    """A profile that has everything for a model, all cases taking 1 ms."""
    devices = ["CPU", *([device] if device else [])]
    profile = replace(
        empty({"cpu": "x", "device_name": device or "none"}),
        device=device or "CPU",
        cases=tuple(case.measured([1e-3], 1e-3) for case in required(wanted, device)),
        rest=tuple(
            RestCase(device=d, n_tokens=n, n_kv=kv, seconds=1e-3, samples=(1e-3,), shape=shape)
            for d in devices
            for n, kv in wanted.rest
            for shape in (SHAPE, PLAIN)
        ),
    )
    if not device:
        return profile
    return replace(
        profile,
        link=dict.fromkeys(LINKS, LINE),
        boundary=LINE,
        launch_s=1e-5,
        sharing=tuple(Sharing(*pair, n, 2.0, 2.0, 1.0, 1.0) for pair in PAIRS for n in (1, 32)),
        copy_wait=0.5,
        launch_issue_s=1e-6,
    )


SMALL = want((64, 32, 1))
LARGE = want((64, 32, 1), (128, 64, 1))


def test_a_profile_serves_every_model_whose_cases_it_has() -> None:
    assert is_complete(measured(LARGE), SMALL)
    assert not is_complete(measured(SMALL), LARGE)
    lacking = missing_cases(measured(SMALL), required(LARGE, None))
    assert {case.mul_mat.shape for case in lacking} == {(128, 64, 1)}
    assert len(lacking) == 2


@pytest.mark.parametrize(
    "part", ["link", "boundary", "launch_s", "rest", "cases", "sharing", "copy_wait", "launch_issue_s"]
)
def test_no_part_may_be_missing_with_a_device(part: str) -> None:
    whole = measured(SMALL, "CUDA0")
    nothing = getattr(empty({}), part)
    assert not is_complete(replace(whole, **{part: nothing}), SMALL)


def test_batch_sizes_working_sets_and_head_shapes_are_not_mixed_up() -> None:
    profile = measured(SMALL)
    assert not is_complete(profile, want((64, 32, 1), tokens=(1, 32, 512)))
    assert not is_complete(profile, want((64, 32, 1), size=1 << 21))
    other_heads = replace(SMALL, rest_shape=replace(SHAPE, n_head_kv=2))
    assert [at[:2] for at in missing_rest(profile, other_heads, "CPU")] == [(1, 256)] * 2 + [(32, 256)] * 2
    both = [(n, 256, shape) for n in (1, 32) for shape in (SHAPE, PLAIN)]
    assert missing_rest(profile, SMALL, "CUDA0") == both
    quantised = replace(SMALL, rest_shape=replace(SHAPE, type_k="q8_0", type_v="q8_0"))
    assert [shape for *_, shape in missing_rest(profile, quantised, "CPU")] == [quantised.rest_shape] * 2


def test_a_profile_of_one_way_of_attention_is_kept_and_lacks_only_the_other() -> None:
    """As profiles before 2026-11-21 are, which had no flash attention only where the device lacks it."""
    profile = measured(SMALL)
    for shape, other in ((SHAPE, PLAIN), (PLAIN, SHAPE)):
        old = replace(profile, rest=tuple(rest for rest in profile.rest if rest.shape == shape))
        assert missing_rest(old, SMALL, "CPU") == [(1, 256, other), (32, 256, other)]
        assert not missing_cases(old, required(SMALL, None))
        assert select(old, SMALL).rest == old.rest
        cannot = tuple(rest_skipped("CPU", n, n_kv, other, "cannot") for n, n_kv in SMALL.rest)
        assert is_complete(replace(old, skipped=cannot), SMALL)
        measured_already = tuple(rest_skipped("CPU", n, n_kv, shape, "cannot") for n, n_kv in SMALL.rest)
        assert not is_complete(replace(old, skipped=measured_already), SMALL), "it says nothing of the other way"


def test_a_model_gets_only_its_own_part_in_a_fixed_order() -> None:
    store = measured(LARGE, "CUDA0")
    part = select(store, SMALL)
    assert {case.mul_mat.shape for case in part.cases} == {(64, 32, 1)}
    assert {case.device for case in part.cases} == {"CPU", "CUDA0"}
    left_out = tuple(case.skipped("no kernel") for case in cases_at(LARGE, "CPU", "AMX"))
    assert {case.mul_mat.shape for case in select(replace(store, skipped=left_out), SMALL).skipped} == {(64, 32, 1)}
    shuffled = replace(store, cases=store.cases[::-1], rest=store.rest[::-1])
    assert select(shuffled, SMALL) == part
    repacked = [case.measured([1e-3], 1e-3) for case in cases_at(SMALL, "CPU", "CPU_REPACK")]
    assert len(select(replace(store, cases=store.cases + tuple(repacked)), SMALL).cases) == len(part.cases) + 2
    assert {rest.shape for rest in select(replace(store, rest=(*store.rest, replace(
        store.rest[0], shape=replace(SHAPE, n_ff=1)))), SMALL).rest} == {SHAPE, PLAIN}  # fmt: skip


def test_noise_in_the_model_s_own_cases_becomes_a_warning() -> None:
    profile = measured(LARGE)
    noisy = replace(profile.cases[-1], samples=(1e-3, 3e-3, 1e-3, 2e-3))
    less = replace(profile.cases[-2], samples=(1e-3, 1.2e-3, 1e-3, 1.1e-3))
    for pair in ((less, noisy), (noisy, less)):
        worst = select(replace(profile, cases=(*profile.cases[:-2], *pair)), LARGE).warnings[-1]
        assert "2 of 8 cases" in worst and f"at {noisy.n_tokens} tokens" in worst
    store = replace(profile, cases=(*profile.cases[:-1], noisy), warnings=("the machine was busy",))
    warned = select(store, LARGE).warnings
    assert warned[0] == "the machine was busy"
    assert len(warned) == 2
    assert "1 of 8 cases had not settled" in warned[1] and "128x64x1" in warned[1] and "--refresh" in warned[1]
    assert select(store, SMALL).warnings == ("the machine was busy",)


def test_what_was_measured_in_another_way_is_measured_anew() -> None:
    whole = measured(SMALL, "CUDA0")
    assert still_valid(whole) == whole
    before = replace(whole, link={name: fit for name, fit in whole.link.items() if name != "d2h_pinned"})
    kept = still_valid(before)
    assert kept.cases == whole.cases and kept.link == before.link
    assert missing_link(kept) == ["d2h_pinned", "boundary"] and len(missing_sharing(kept, SMALL)) == 6
    alone = measured(SMALL)
    assert still_valid(alone) == alone


def test_of_a_profile_from_before_only_what_works_at_the_same_time_is_measured() -> None:
    whole = measured(SMALL, "CUDA0")
    before = replace(
        whole,
        link=dict.fromkeys(("h2d_pinned", "h2d_pageable", "d2h"), LINE),
        sharing=(),
        copy_wait=None,
        launch_issue_s=None,
    )
    assert not is_complete(before, SMALL)
    assert missing_link(before) == ["d2h_pinned", "issue_pinned", "issue_pageable", "copy_wait", "launch_issue_s"]
    assert missing_cases(before, required(SMALL, "CUDA0")) == [] == missing_rest(before, SMALL, "CUDA0")
    assert sorted(missing_sharing(before, SMALL)) == sorted((*pair, n) for pair in PAIRS for n in (1, 32))
    assert missing_sharing(replace(whole, sharing=whole.sharing[1:]), SMALL) == [("cpu", "device", 1)]


def test_nothing_is_shared_without_a_second_device_or_kernels_on_it() -> None:
    bare = replace(measured(SMALL), sharing=())
    assert missing_sharing(bare, SMALL) == [] and is_complete(bare, SMALL)
    assert missing_sharing(replace(measured(SMALL, "cpu-pair"), sharing=()), SMALL) == []
    there = measured(SMALL, "CUDA0")
    left_out = [case.skipped("no kernel") for case in cases_at(SMALL, "CUDA0", "device")]
    beside_copies = tuple(one for one in there.sharing if (one.first, one.second) == ("cpu", "link"))
    no_kernel = replace(
        there, cases=tuple(c for c in there.cases if c.device == "CPU"), skipped=tuple(left_out), sharing=beside_copies
    )
    assert is_complete(no_kernel, SMALL)
    assert not is_complete(replace(no_kernel, sharing=()), SMALL), "the CPU beside copies needs no kernel there"
    both = want((64, 32, 1), (64, 32, 8))
    stacks = [case for case in measured(both, "CUDA0").cases if case.device == "CPU" or case.mul_mat.shape[2] == 8]
    assert is_complete(replace(no_kernel, cases=tuple(stacks)), both), "experts are not measured at the same time"


def test_what_an_old_file_says_of_cpu_and_link_is_measured_again() -> None:
    whole = measured(SMALL, "CUDA0")
    old = replace(whole, sharing=tuple(replace(one, assumed=True) for one in whole.sharing))
    assert len(missing_sharing(old, SMALL)) == 6 and not is_complete(old, SMALL)
