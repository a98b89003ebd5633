"""Profiles of described rates: complete, storable, and as fast as what they are described by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import CARD, HOST, ROUTED, SMALL, World

from oallama.core.errors import ProfileError
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, Attention
from oallama.profile.described import EXPERTS, described, host_profile, with_card
from oallama.profile.merge import missing_link, missing_sharing
from oallama.profile.store import profile_from_json, profile_to_json
from oallama.profile.wanted import wanted

WORLD = World(model=SMALL, tokens=(1, 32, 512))
MOE = World(model=ROUTED, tokens=(1, 32, 512))


def test_nothing_is_left_to_measure_and_it_can_be_stored() -> None:
    want = wanted(MOE.model, MOE.operators, MOE.tokens, llc_bytes=0)
    profile = MOE.profile
    assert missing_link(profile) == [] and missing_sharing(profile, want) == []
    assert profile_from_json(profile_to_json(profile)) == profile
    facts = profile.fingerprint
    assert facts["described"] and facts["device_host_buffer"] and facts["device_asynchronous"]
    assert profile.is_pinned and not profile.is_blocking


def test_points_of_the_link_lie_on_their_lines_and_nothing_slows_the_card() -> None:
    for name, line in WORLD.profile.link.items():
        assert line.points, name
        assert [seconds for _, seconds in line.points] == pytest.approx([line.seconds(n) for n, _ in line.points]), name
    with_device = [pair for pair in WORLD.profile.sharing if pair.second == "device"]
    assert {pair.first for pair in with_device} == {"cpu"}
    for pair in with_device:
        rate = pytest.approx(CARD.bytes_per_s / 1e9)
        assert (pair.second_alone_gb_per_s, pair.second_with_first_gb_per_s) == (rate, rate)


def test_cpu_and_link_together_read_what_the_dram_gives() -> None:
    of = SMALL, WORLD.operators
    profile = with_card(host_profile(HOST, *of, WORLD.tokens), CARD, *of, dram_bytes_per_s=45e9)
    shared = profile.contention
    assert shared.first_with_second_gb_per_s + shared.second_with_first_gb_per_s == pytest.approx(45)


def test_a_measured_cpu_keeps_its_cases_and_loses_the_device_it_had() -> None:
    before = replace(WORLD, card=replace(CARD, name="another")).profile
    profile = with_card(before, CARD, SMALL, WORLD.operators)
    assert profile.device == "card"
    assert {case.device for case in (*profile.cases, *profile.rest)} == {CPU_DEVICE, "card"}
    assert [c for c in profile.cases if c.device == CPU_DEVICE] == [c for c in before.cases if c.device == CPU_DEVICE]
    with pytest.raises(ProfileError, match="no mul-mat of the CPU"):
        with_card(replace(before, cases=()), CARD, SMALL, WORLD.operators)


def mul_mat_s(profile: Profile, *, op: str = "MUL_MAT", n_tokens: int = 512) -> float:
    """On the card; of attn_q, or of experts."""
    return next(
        case.seconds
        for case in profile.cases
        if (case.mul_mat.op, case.device, case.n_tokens) == (op, "card", n_tokens)
        and (op == "MUL_MAT_ID" or case.mul_mat.shape[:2] == (1024, 1024))
    )


def test_a_mul_mat_takes_what_its_flop_or_bytes_take_whichever_is_more() -> None:
    flop, n_bytes = 2 * 1024 * 1024, 1024 * 1024 * 18 / 32
    assert mul_mat_s(WORLD.profile) == pytest.approx(512 * flop / CARD.flops_per_s + CARD.kernel_s)
    floats = replace(WORLD, type_name="F16").profile
    assert mul_mat_s(floats) == pytest.approx(512 * flop / CARD.flops_float_per_s + CARD.kernel_s)
    moved = n_bytes + 4 * 2 * 1024
    assert mul_mat_s(WORLD.profile, n_tokens=1) == pytest.approx(moved / CARD.bytes_per_s + CARD.kernel_s)
    routed = next(case.mul_mat for case in MOE.profile.cases if case.mul_mat.op == "MUL_MAT_ID")
    expected = routed.flops(512) / CARD.flops_per_s / EXPERTS + CARD.kernel_s
    assert mul_mat_s(MOE.profile, op="MUL_MAT_ID") == pytest.approx(expected)


def test_attention_takes_more_with_depth_and_without_flash_attention() -> None:
    def rest_s(n_kv: int, flash_attn: bool) -> float:
        (seconds,) = {
            case.seconds
            for case in WORLD.profile.rest
            if (case.device, case.n_tokens, case.n_kv) == ("card", 512, n_kv)
            and case.shape
            and case.shape.flash_attn is flash_attn
        }
        return seconds

    assert rest_s(1024, True) < rest_s(4096, True) < rest_s(4096, False) < rest_s(16384, False)
    quantised = described(
        HOST, CARD, SMALL, WORLD.operators, (1, 32), Attention(flash_attn="on", type_k="q8_0", type_v="q8_0")
    )
    assert {case.shape.type_k for case in quantised.rest if case.shape} == {"q8_0"}


def test_a_host_may_be_slower_with_some_types_and_in_attention() -> None:
    host = replace(HOST, flops_by_type=(("Q6_K", 1e11),), flops_attention_per_s=2e11)
    assert [host.rate_of(kind) for kind in ("Q4_0", "Q6_K", "F16", None)] == [1e12, 1e11, 0.5e12, 2e11]
    assert host.kernel_seconds(1e11, 1.0, "Q6_K") == pytest.approx(1 + host.kernel_s)
    plain = replace(HOST, flops_float_per_s=None)
    assert plain.rate_of("F16") == plain.rate_of(None) == 1e12
