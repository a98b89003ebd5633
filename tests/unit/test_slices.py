"""Blocks, and Eq. 4 and 15: what a sliced block's tasks take, by hand and in worlds whose times are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import block_of, experts
from seeds import examples
from slicing_cases import MACHINES, SHARED_MACHINES, STREAMED
from split_cases import EMBD, FF, World, ffn, llama, operator

from oallama.core.errors import ProfileError
from oallama.core.profile import LinearFit, Profile, Sharing
from oallama.core.types import Operator
from oallama.cost.blocks import (
    LOGITS_CHUNK,
    SUM_BYTES,
    SplitBlock,
    can_split,
    ffn_block,
    slice_weights,
    split_blocks,
)
from oallama.cost.kernels import Kernels
from oallama.cost.rates import (
    BYTES_PER_WAIT,
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    Interference,
    SliceRates,
    slice_rates,
)
from oallama.cost.slices import BlockType, Cut, Pricing, block_types, slice_times
from oallama.cost.timeline import Step, cycle_seconds

SIZE = 147456  # bytes of one of an FFN's weights


def groups(ops: list[Operator], gg: list[int] | None = None) -> list[tuple[str, ...]]:
    return [tuple(ops[i].role for i in block.operators) for block in split_blocks(ops, gg or [32] * len(ops))]


def one_ffn(world: World) -> tuple[BlockType, SliceRates, SplitBlock]:
    """The FFN of a model whose attention has other sizes, so that the profile shows what a mul-mat of no size takes."""
    profile = world.profile(llama(1), ("CPU", "CPU_REPACK"))
    of = block_of(llama(1), profile)
    return of, slice_rates(profile), of.block


def test_an_ffn_is_one_block_and_everything_else_is_alone() -> None:
    assert groups(llama(1)) == [
        ("attn_q",), ("attn_v",), ("attn_k",), ("attn_output",), ("ffn_gate", "ffn_up", "ffn_down"), ("output",)
    ]  # fmt: skip
    assert groups(ffn(0) + ffn(1)) == [("ffn_gate", "ffn_up", "ffn_down")] * 2
    assert groups(ffn(0)[1:]) == [("ffn_up", "ffn_down")]
    fused = [operator("ffn_up", EMBD, 2 * FF, gate_up=True), ffn(0)[2]]
    assert groups(fused) == [("ffn_up", "ffn_down")]
    shared = [operator(f"{op.role}_shexp", *op.shape[:2]) for op in ffn(0)]
    assert groups(experts() + shared) == [
        ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
    ]  # fmt: skip


def test_what_cannot_run_as_one_is_split_operator_by_operator() -> None:
    alone = [("ffn_gate",), ("ffn_up",), ("ffn_down",)]
    assert groups(ffn(0), [32, 32, 64]) == alone, "cut at different elements"
    assert groups(ffn(0)[:2]) == alone[:2], "down is elsewhere"
    assert groups([*ffn(0)[:2], operator("ffn_down", 2 * FF, EMBD)]) == alone, "of another width"
    assert len(groups(experts(biased=True))) == 3, "a bias of each expert comes between"
    assert groups(ffn(0), [32, 0, 32]) == [("ffn_gate",), ("ffn_down",)], "up is not split"


@pytest.mark.parametrize(
    ("op", "possible"),
    [
        (ffn(0)[0], True),
        (operator("output", EMBD, 3200, None), True),
        (operator("token_embd", EMBD, 3200, None), False),
        (operator("attn_k_b", 64, 256, e=8), False),
        (operator("ffn_gate_inp", EMBD, 8), False),
        (operator("attn_k", EMBD, 32), False),
        (operator("ssm_in", EMBD, 1024), False),
        (experts()[0], True),
    ],
)
def test_what_can_be_split(op: Operator, possible: bool) -> None:
    assert can_split(op) is possible


def test_activations_and_weights_of_a_block() -> None:
    (block,) = split_blocks(ffn(0), [32] * 3)
    assert (block.extent, block.step, block.bytes) == (FF, 32, 3 * EMBD * FF // 32 * 18)
    assert (block.upload_bytes(256, 7), block.download_bytes(256, 7)) == (7 * EMBD * 4, 7 * EMBD * 4)
    assert block.weight_bytes(256) * 4 == block.bytes
    assert block.staging_bytes(256, 7) == (EMBD + 3 * 256) * 7 * 4, "the result takes the place of gate and up"
    assert block.staging_bytes(32, 7) == (2 * EMBD + 3 * 32) * 7 * 4, "where it fits there: what was sent stays"
    assert block.staging_bytes(0, 7, 256) == block.staging_bytes(256, 7)
    assert block.staging_bytes(256, 7, 512) == (2 * EMBD + 3 * 512) * 7 * 4, "GG's result is kept"
    assert block.staging_bytes(512, 7, 32) == (EMBD + 3 * 512) * 7 * 4
    (routed,) = split_blocks(experts(), [32] * 3)
    assert (routed.upload_bytes(256, 7), routed.download_bytes(256, 7)) == (7 * (EMBD + 2) * 4, 7 * 2 * EMBD * 4)
    assert routed.n_summed(7) == 1, "too few bytes would be saved"
    large = SUM_BYTES // (EMBD * 4)  # one of two results of each token need not come back
    assert (routed.n_summed(large - 1), routed.n_summed(large)) == (1, 2)
    assert routed.upload_bytes(256, large) == large * (EMBD + 2 + 2) * 4, "ids and routing weights"
    assert routed.download_bytes(256, large) == large * EMBD * 4
    assert routed.download_bytes(256, 3, large) == 3 * EMBD * 4, "of a large batch a few tokens (n_g)"
    assert routed.staging_bytes(1, large) == routed.upload_bytes(1, large) + large * 3 * EMBD * 4, "the sum lies beside"
    assert routed.staging_bytes(FF, large) == routed.upload_bytes(1, large) + large * 3 * 2 * FF * 4
    (down,) = split_blocks(experts()[2:], [32])
    assert down.download_bytes(256, large) == large * EMBD * 4
    (biased,) = split_blocks(experts(biased=True)[2:], [32])
    assert biased.download_bytes(32, large) == large * 2 * 32 * 4, "biases are added first"
    assert ffn_block(experts(biased=True), range(3)).n_summed(large) == 2, "and by themselves where they are hot"
    (rows,) = split_blocks([operator("output", EMBD, 3200, None)], [32])
    assert (rows.upload_bytes(320, 7), rows.download_bytes(320, 7)) == (7 * EMBD * 4, 7 * 320 * 4)
    assert rows.staging_bytes(320, 7, 64) == (EMBD + 320 + 64) * 7 * 4
    assert rows.staging_bytes(320, 512) == rows.staging_bytes(320, LOGITS_CHUNK), "of a few tokens' logits at once"
    (cols,) = split_blocks([ffn(0)[2]], [32])
    assert (cols.upload_bytes(256, 7), cols.download_bytes(256, 7)) == (7 * 256 * 4, 7 * EMBD * 4)
    (halves,) = split_blocks([operator("ffn_up", EMBD, 2 * FF, gate_up=True)], [32])
    assert (halves.extent, halves.download_bytes(256, 7)) == (FF, 7 * 2 * 256 * 4)
    assert slice_weights(ffn(0) + ffn(1), [256] * 3 + [64] * 3) == block.weight_bytes(256) + block.weight_bytes(64)
    assert slice_weights(ffn(0), []) == 0


def test_a_block_that_is_split_by_hand() -> None:
    """One FFN, one token: 3 mul-mats of SIZE bytes, a quarter on the device."""
    world = World(cpu_rate=1e9, device_rate=5e8, launch_s=3e-5, link=LinearFit(1e-5, 1e-9, 1.0))
    ops = ffn(0)
    cut = Cut(768, 0, 256)

    def seconds(profile: Profile) -> float:
        return Pricing(slice_rates(profile)).seconds(block_of(ops, profile), cut, 1)

    upload_s = download_s = 1e-5 + 1e-9 * EMBD * 4
    host_s, device_s = 0.75 * 3 * SIZE / 1e9, 0.25 * 3 * SIZE / 5e8
    join_s = 3 * 4 * EMBD / 1e9  # reads two results and writes one, as fast as the CPU reads weights
    around_s = upload_s + download_s + join_s
    assert seconds(world.profile(ops)) == pytest.approx(around_s + max(host_s, 3e-5 + device_s))
    known = replace(world.profile(ops), launch_issue_s=1e-5)
    assert seconds(known) == pytest.approx(around_s + 1e-5 + max(host_s, 2e-5 + device_s))
    waiting = replace(known, fingerprint={"device_asynchronous": False})
    assert seconds(waiting) == pytest.approx(around_s + 3e-5 + device_s + host_s)
    slower = replace(known, sharing=(Sharing("cpu", "device", 1, 20.0, 50.0, 10.0, 50.0),))
    assert seconds(slower) > seconds(known)


@given(
    st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.floats(0, 1e-4), st.floats(0, 1e-4), st.floats(0, 1e-9),
    st.sampled_from([1, 7, 32, 100, 512]), st.integers(1, 31),
)  # fmt: skip
@settings(max_examples=examples(60))
def test_a_slice_takes_what_a_weight_of_its_size_would(
    cpu_rate: float, device_rate: float, alpha_s: float, device_alpha_s: float, token_s: float, n_tokens: int, cut: int
) -> None:
    """In a world where every mul-mat takes alpha + beta * size, slices are priced as if they had been profiled."""
    world = World(cpu_rate, device_rate, alpha_s, device_alpha_s, token_s, 0.0, LinearFit(0.0, 0.0, 1.0))
    small = operator("attn_v", EMBD, 64)  # another size, or alpha could not be told from beta
    ops = [*ffn(0), small]
    of = block_of(ops, world.profile(ops))
    gg = 32 * cut
    host_s, device_s = (
        sum(world.seconds(there, op.bytes * share, n_tokens) for op in ops[:3])
        for there, share in ((False, 1 - gg / FF), (True, gg / FF))
    )
    assert of.gemms.cpu_s(1 - gg / FF, n_tokens) == pytest.approx(host_s, rel=1e-3)
    assert of.gemms.gpu_s(gg / FF, n_tokens) == pytest.approx(device_s, rel=1e-3)


@given(st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.floats(0, 1e-8), st.floats(0, 1e-3))
@settings(max_examples=examples(50))
def test_the_time_of_a_block_is_convex_in_its_cut(
    cpu_rate: float, device_rate: float, token_s: float, launch_s: float
) -> None:
    ops = ffn(0)
    profile = World(cpu_rate, device_rate, 0.0, 0.0, token_s, launch_s).profile(ops)
    of, on = block_of(ops, profile), Pricing(slice_rates(profile))
    seconds = [on.seconds(of, Cut(FF - gg, 0, gg), 512) for gg in range(32, FF, 32)]
    slopes = [b - a for a, b in pairwise(seconds)]
    assert all(b >= a - 1e-9 * max(seconds) for a, b in pairwise(slopes))


def test_assigned_tokens_move_cc_to_the_device() -> None:
    of, rates, _ = one_ffn(World(cpu_rate=1e9, device_rate=5e9, token_s_per_byte=1e-10, link=LinearFit(0.0, 1e-9, 1.0)))
    at = {n_g: slice_times(of, rates, Cut(768, 0, 256), 512, n_g) for n_g in (0, 1, 256, 512)}
    assert [len(times.steps) for times in at.values()] == [1, 2, 2, 2]
    assert [step.copy_s for step in at[1].steps] == [0, pytest.approx(3 * 0.75 * SIZE * 1e-9)]
    assert at[256].cpu_s == pytest.approx(of.gemms.cpu_s(0.75, 256))
    assert at[512].cpu_s == 0
    assert at[512].steps[1].gpu_s == pytest.approx(of.gemms.gpu_s(0.75, 512))


def test_whole_blocks_are_llama_cpps() -> None:
    of, rates, _ = one_ffn(World())
    for whole in (Cut(FF, 0, 0), Cut(0, 0, FF)):
        times = slice_times(of, rates, whole, 1)
        assert times.send_s == times.join_s == 0
        assert times.cpu_s + sum(step.gpu_s for step in times.steps) > 0
    assert slice_times(of, rates, Cut(0, FF, 0), 1).join_s > 0


def test_of_experts_only_the_routed_ones_are_streamed_and_not_before_they_are_known() -> None:
    ops = experts()
    profile = replace(World().profile(ops), link={"h2d_pinned": LinearFit(2e-5, 1e-9, 1.0), "d2h": LinearFit(0, 0, 1)})
    of, rates = block_of(ops, profile), slice_rates(profile)
    decode, prefill = (slice_times(of, rates, Cut(0, FF, 0), n) for n in (1, 512))
    assert decode.routed and prefill.routed
    n_bytes = of.block.bytes
    assert decode.steps[0].copy_s == pytest.approx(2e-5 + n_bytes * 2 / 8 * 1e-9)
    assert prefill.steps[0].copy_s == pytest.approx(2e-5 + n_bytes * 1e-9)
    asking = replace(rates, issue=LinearFit(1e-6, 0.0, 1.0))
    assert slice_times(of, asking, Cut(0, FF, 0), 1).issue_s >= 3 * 2e-6, "a copy for each expert"


def test_what_llama_cpp_runs_whole_costs_what_it_takes_there() -> None:
    """It may have a faster layout, or stream large batches by itself; a slice has no such price."""
    of, rates, _ = one_ffn(World())
    priced = replace(of, around=replace(of.around, whole=((1, 1e-6), (512, 2e-6))))
    assert slice_times(priced, rates, Cut(FF, 0, 0), 512).cpu_s == 2e-6
    beside = Interference(0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    sent = replace(priced, around=replace(priced.around, offload=((512, 5e-7),)))
    copied = slice_times(sent, replace(rates, interference=((1, beside),)), Cut(FF, 0, 0), 512)
    assert (copied.cpu_s, copied.steps, copied.offloaded) == (0.0, (Step(5e-7, 2e-6 - 5e-7),), True)
    assert copied.interference == beside
    cut = Cut(768, 0, 256)
    assert slice_times(priced, rates, cut, 512) == slice_times(of, rates, cut, 512)
    for takes in (True, False):
        given = slice_times(replace(priced, takes_n_g=takes), rates, Cut(FF, 0, 0), 512, n_g=256)
        assert bool(given.steps) is takes


@given(st.floats(1e-7, 1e-4), st.floats(1e8, 1e11))
def test_pieces_cost_the_least_of_asking_and_waiting(ask_s: float, bytes_per_s: float) -> None:
    rates = replace(
        slice_rates(World().profile(ffn(0))),
        weights=LinearFit(0.0, 1 / bytes_per_s, 1.0),
        issue=LinearFit(ask_s, 0.0, 1.0),
    )

    def cost(piece: float) -> float:
        return BYTES_PER_WAIT / piece * ask_s + piece / bytes_per_s / 2

    assert rates.piece_bytes % 4096 == 0
    sizes = [MIN_PIECE_BYTES * 2 ** (i / 4) for i in range(4 * 7 + 1)]
    assert sizes[-1] == MAX_PIECE_BYTES
    assert cost(rates.piece_bytes) <= 1.01 * min(map(cost, sizes))


def test_what_was_not_measured_is_said() -> None:
    ops = ffn(0)
    profile = World().profile(ops, ("CPU", "AMX"))
    (block,) = split_blocks(ops, [FF] * 3)
    assert [one.layout for one in block_types(Kernels(profile), ops, block)] == ["AMX", "CPU"]
    on_cpu = replace(profile, cases=tuple(case for case in profile.cases if case.device == "CPU"))
    assert block_types(Kernels(on_cpu), ops, block) == (), "the device cannot compute it"
    with pytest.raises(ProfileError, match=r"no CPU timing of Q4_0 .*blk\.0\.ffn_gate\.weight"):
        block_types(Kernels(replace(profile, cases=())), ops, block)
    with pytest.raises(ProfileError, match="no link"):
        slice_rates(replace(profile, link={}))


@settings(max_examples=examples(100))
@given(
    STREAMED,
    MACHINES | SHARED_MACHINES,
    st.lists(st.floats(0.0, 1e-2), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([(1, 0), (32, 0), (32, 20)]),
)
def test_a_kind_that_was_priced_before_costs_what_one_that_was_not_does(
    block: BlockType, on: Pricing, gaps_s: list[float], share: float, tokens: tuple[int, int]
) -> None:
    """Between whatever gaps, with and without copies that run ahead."""
    extent, step = block.block.extent, block.block.step
    cg = min(extent, round(share * extent / step) * step)
    for gap_s in gaps_s:
        placed = replace(block, around=replace(block.around, gap=((1, gap_s),), gap_cpu=((1, gap_s / 2),)))
        for cut in (Cut(extent - cg, cg, 0), Cut(extent - step, 0, step), Cut(extent, 0, 0)):
            known = on.seconds(placed, cut, *tokens)
            assert known == pytest.approx(Pricing(on.rates, on.streaming).seconds(placed, cut, *tokens))
            times = on.block_times(placed, cut, *tokens)
            assert known == pytest.approx(cycle_seconds([times], on.streaming))
