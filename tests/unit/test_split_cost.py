"""Blocks of split operators and what they cost, against hand arithmetic and against a world whose times are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import EMBD, FF, World, ffn, llama, model, operator

from oallama.core.types import CPU_DEVICE, LinearFit, Operator
from oallama.cost.blocks import can_split, slice_memory, split_blocks
from oallama.cost.graph import build_graph
from oallama.cost.operator_cost import Pass, index_cases, operator_costs
from oallama.cost.predict import Costs, placement_seconds
from oallama.cost.split_ffn import block_seconds, split_costs, split_seconds
from oallama.cost.transfer import NO_TRANSFER, transfer_rates

DECODE = (Pass(1, 256, 1),)
MIXED = (Pass(512, 512, 2, 0), Pass(1, 600, 32))


def experts(biased: bool = False) -> list[Operator]:
    shapes = (("ffn_gate_exps", EMBD, FF), ("ffn_up_exps", EMBD, FF), ("ffn_down_exps", FF, EMBD))
    return [operator(role, k, n, e=8, used=2, biased=biased) for role, k, n in shapes]


def groups(ops: list[Operator], gg: list[int] | None = None) -> list[tuple[str, ...]]:
    return [tuple(ops[i].role for i in block.operators) for block in split_blocks(ops, gg or [32] * len(ops))]


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
    assert block.staging_bytes(256, 7) == (2 * EMBD + 3 * 256) * 7 * 4
    (routed,) = split_blocks(experts(), [32] * 3)
    assert (routed.upload_bytes(256, 7), routed.download_bytes(256, 7)) == (7 * (EMBD + 2) * 4, 7 * 2 * EMBD * 4)
    (rows,) = split_blocks([operator("output", EMBD, 3200, None)], [32])
    assert (rows.upload_bytes(320, 7), rows.download_bytes(320, 7)) == (7 * EMBD * 4, 7 * 320 * 4)
    (cols,) = split_blocks([ffn(0)[2]], [32])
    assert (cols.upload_bytes(256, 7), cols.download_bytes(256, 7)) == (7 * 256 * 4, 7 * EMBD * 4)
    (halves,) = split_blocks([operator("ffn_up", EMBD, 2 * FF, gate_up=True)], [32])
    assert (halves.extent, halves.download_bytes(256, 7)) == (FF, 7 * 2 * 256 * 4)
    assert slice_memory(ffn(0) + ffn(1), [256] * 3 + [64] * 3, 7) == (
        block.weight_bytes(256) + block.weight_bytes(64), block.staging_bytes(256, 7)
    )  # fmt: skip
    assert slice_memory(ffn(0), [], 7) == (0, 0)


def test_k_quants_are_cut_at_whole_blocks_and_gg_takes_the_rest() -> None:
    (block,) = split_blocks(ffn(0, "Q4_K"), [256] * 3)
    assert tuple(block.cuts()) == (256, 512, 768)
    (odd,) = split_blocks([operator("output", EMBD, 100, None)], [4])
    assert tuple(odd.cuts()) == (4, 36, 68), "CC is 96, 64 or 32 of 100 rows"


def test_a_block_by_hand() -> None:
    """One FFN, one token: 3 mul-mats of 147,456 bytes, a quarter on the device."""
    world = World(cpu_rate=1e9, device_rate=5e8, launch_s=3e-5, link=LinearFit(1e-5, 1e-9, 1.0))
    ops = ffn(0)
    costs = split_costs(world.profile(ops), ops, 2, DECODE)
    (block,) = split_blocks(ops, [1] * 3)
    upload_s = download_s = 1e-5 + 1e-9 * EMBD * 4
    host_s, device_s = 0.75 * 3 * 147456 / 1e9, 0.25 * 3 * 147456 / 5e8
    join_s = 3 * 4 * EMBD / 1e9  # reads two results and writes one, as fast as the CPU reads weights
    expected = upload_s + max(host_s, 3e-5 + device_s) + download_s + join_s
    assert block_seconds(costs, block, (256,)) == (pytest.approx(expected),)
    assert split_seconds(costs, [256] * 3) == pytest.approx(expected)
    known = replace(world.profile(ops), launch_issue_s=1e-5)
    queued = upload_s + 1e-5 + max(host_s, 2e-5 + device_s) + download_s + join_s
    assert block_seconds(split_costs(known, ops, 2, DECODE), block, (256,)) == (pytest.approx(queued),)
    waiting = replace(known, fingerprint={"device_asynchronous": False})
    one_after_the_other = upload_s + 3e-5 + device_s + host_s + download_s + join_s
    assert block_seconds(split_costs(waiting, ops, 2, DECODE), block, (256,)) == (pytest.approx(one_after_the_other),)


@given(
    st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.floats(0, 1e-4), st.floats(0, 1e-4), st.floats(0, 1e-9),
    st.sampled_from([1, 7, 32, 100, 512]), st.integers(1, 31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_slice_takes_what_a_weight_of_its_size_would(
    cpu_rate: float, device_rate: float, alpha_s: float, device_alpha_s: float, token_s: float, n_tokens: int, cut: int
) -> None:
    """In a world where every mul-mat takes alpha + beta * size, slices are priced as if they had been profiled."""
    world = World(cpu_rate, device_rate, alpha_s, device_alpha_s, token_s, 0.0, LinearFit(0.0, 0.0, 1.0))
    small = operator("attn_v", EMBD, 64)  # another size, or alpha could not be told from beta
    ops = [*ffn(0), small]
    gg = 32 * cut
    (block,) = split_blocks(ops[:3], [gg] * 3)
    costs = replace(split_costs(world.profile(ops), ops, 2, (Pass(n_tokens, 512, 1),)), join_s_per_byte=0.0)
    host_s, device_s = (
        sum(world.seconds(there, op.bytes * share, n_tokens) for op in ops[:3])
        for there, share in ((False, 1 - gg / FF), (True, gg / FF))
    )
    assert block_seconds(costs, block, (gg,))[0] == pytest.approx(max(host_s, device_s), rel=1e-3)


@given(st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.floats(0, 1e-8), st.floats(0, 1e-3))
@settings(max_examples=50, deadline=None)
def test_the_time_of_a_block_is_convex_in_its_cut(
    cpu_rate: float, device_rate: float, token_s: float, launch_s: float
) -> None:
    world = World(cpu_rate, device_rate, 0.0, 0.0, token_s, launch_s)
    ops = ffn(0)
    (block,) = split_blocks(ops, [1] * 3)
    seconds = block_seconds(split_costs(world.profile(ops), ops, 2, MIXED), block, tuple(block.cuts()))
    slopes = [b - a for a, b in pairwise(seconds)]
    assert all(b >= a - 1e-9 * max(seconds) for a, b in pairwise(slopes))


def test_the_hosts_slice_is_in_the_fastest_layout_over_all_passes() -> None:
    ops = ffn(0)
    costs = split_costs(World().profile(ops, ("CPU_REPACK", "CPU")), ops, 2, MIXED)
    assert {sides.layout for sides in costs.sides} == {"CPU_REPACK"}


def test_without_a_device_timing_nothing_can_be_split() -> None:
    ops = llama(1)
    profile = World().profile(ops)
    profile = replace(profile, cases=tuple(case for case in profile.cases if case.device == CPU_DEVICE))
    assert not any(split_costs(profile, ops, 1, DECODE).splittable())


def test_only_the_last_token_goes_through_the_last_layers_ffn_and_the_output() -> None:
    ops = llama(2)
    costs = split_costs(World(token_s_per_byte=1e-9).profile(ops), ops, 2, (Pass(512, 512, 1, 1),))
    first, last = (b for b in split_blocks(ops, [32] * len(ops)) if len(b.operators) == 3)
    many, one = (block_seconds(costs, block, (256,))[0] for block in (first, last))
    assert many > 100 * one


def test_a_split_block_replaces_its_operators_and_crosses_like_the_host() -> None:
    ops = llama(2)
    world = World()
    profile = world.profile(ops)
    split = split_costs(profile, ops, 2, DECODE)
    priced = operator_costs(index_cases(profile), ops, 2, "RPC0", DECODE)
    for rates in (NO_TRANSFER, transfer_rates(profile)):
        costs = Costs(priced, build_graph(model(2), ops), rates, DECODE, 0.0, 0.0, split)
        on_device = [op.layer == 1 and op.role.startswith("attn") for op in ops]
        gg = [256 if op.role.startswith("ffn_") and op.layer == 1 else 0 for op in ops]
        whole_s = sum(cost.t_cpu_s for cost, elements in zip(priced, gg, strict=True) if elements)
        difference = placement_seconds(costs, on_device, 0, gg) - placement_seconds(costs, on_device, 0)
        assert difference == pytest.approx(split_seconds(split, gg) - whole_s)
    with pytest.raises(ValueError, match="cannot price"):
        placement_seconds(replace(costs, split=None), on_device, 0, gg)
