"""Where operators may be cut, fractions as exact counts of elements, the blocks that are split as one, and n_g between
the lengths of a plan's table: as the split back end has them (tests/native)."""

from __future__ import annotations

import re
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest
from gguf_factory import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from worlds import ATTENTION, model_info, placed, weight, weights_of

from oallama.core.errors import PlanError
from oallama.core.ggml_types import GGML_TYPES_BY_NAME, MUL_MAT_TYPES
from oallama.core.types import Operator
from oallama.cost.activations import ComputedBlock, activation_bytes
from oallama.cost.blocks import LOGITS_CHUNK, SUM_BYTES, SplitBlock, can_split, ffn_block, slice_weights, split_blocks
from oallama.model.cut import cut_axis, cut_extent, cut_granularity, cut_step
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.plan.split import check_hot_experts, device_share, hot_bytes, slice_counts
from oallama.planner.cutting import n_g_at
from oallama.planner.staging import most_n_g

EMBD, FF = 256, 1024


def operator(role: str, k: int = EMBD, n: int = FF, **more: object) -> Operator:
    return weight(role=role, k=k, n=n, **{"layer": 0, **more})


def ffn(layer: int) -> list[Operator]:
    return [
        *(operator(role, layer=layer) for role in ("ffn_gate", "ffn_up")),
        operator("ffn_down", FF, EMBD, layer=layer),
    ]


def experts(biased: bool = False) -> list[Operator]:
    made = (operator(f"{o.role}_exps", *o.shape[:2], n_expert=8, used=2) for o in ffn(0))
    return [replace(o, biased=biased) for o in made]


def block_bytes(block: SplitBlock, gg: int, n_tokens: int, cg: int = 0) -> int:
    return activation_bytes(((ComputedBlock(block, gg, cg),),), n_tokens)


def groups(ops: list[Operator], gg: list[int] | None = None) -> list[tuple[str, ...]]:
    return [tuple(ops[i].role for i in block.operators) for block in split_blocks(ops, gg or [32] * len(ops))]


#
# axes, steps, counts
#


@pytest.mark.parametrize(
    ("role", "axis"),
    [
        ("ffn_gate", "rows"), ("ffn_up", "rows"), ("ffn_down", "cols"), ("ffn_down_exps", "cols"),
        ("ffn_down_shexp", "cols"), ("enc.ffn_down", "cols"), ("dec.ffn_up", "rows"), ("attn_output", "rows"),
        ("attn_qkv", "rows"), ("output", "rows"), ("ffn_latent_down", "rows"), ("hc_ffn_down", "rows"),
    ],
)  # fmt: skip
def test_only_the_second_mul_mat_of_an_ffn_is_cut_through_k(role: str, axis: str) -> None:
    """But where experts have biases, which run one by one."""
    made = operator(role, 1024, 4096, n_expert=8 if role.endswith("_exps") else 0)
    assert cut_axis(made) == axis
    assert cut_extent(made) == (1024 if axis == "cols" else 4096)
    biased = "rows" if role.endswith("_exps") else axis
    assert cut_axis(replace(made, biased=True)) == biased


@pytest.mark.parametrize(
    ("arch", "fused", "biased"),
    [
        ("llama", set(), set()), ("phi3", {"ffn_up"}, set()), ("glm4", {"ffn_up"}, set()),
        ("gptneox", set(), {"ffn_up", "ffn_down"}), ("qwen2moe", set(), set()),
    ],
)  # fmt: skip
def test_gate_and_up_in_one_weight_and_biases_are_seen(arch, fused, biased, tmp_path: Path) -> None:
    """What is fused is cut in both halves."""
    found = operators(read_gguf(write_gguf(tmp_path / "model.gguf", arch)))
    assert {o.role for o in found if cut_axis(o) == "halves"} == fused
    assert {o.role for o in found if o.biased} >= biased and (arch != "llama" or not any(o.biased for o in found))
    for o in found:
        assert cut_extent(o) * (2 if o.gate_up else 1) in o.shape


@pytest.mark.parametrize(
    ("arch", "parallel"),
    [
        ("falcon", {"attn_output"}), ("phi2", {"ffn_up"}), ("command-r", set()), ("gptneox", set()),
        ("llama", set()), ("gpt-oss", set()), ("olmo2", set()), ("glm4", set()),
    ],
)  # fmt: skip
def test_an_ffn_may_run_right_beside_attentions_output(arch: str, parallel: set[str], tmp_path: Path) -> None:
    """Where it reads the layer's input, and neither a norm nor the residual comes between."""
    found = operators(read_gguf(write_gguf(tmp_path / "model.gguf", arch)))
    assert {o.role for o in found if o.adjoins and o.role not in ATTENTION[:3]} == parallel


@pytest.mark.parametrize("type_name", sorted(MUL_MAT_TYPES))
def test_granularity_keeps_quantisation_blocks_and_row_groups_whole(type_name: str) -> None:
    block = GGML_TYPES_BY_NAME[type_name].block_size
    assert cut_granularity(operator("ffn_up", 1024, 4096, type_name=type_name)) == 32
    assert cut_granularity(operator("ffn_down", 1024, 4096, type_name=type_name)) == lcm(block, 32)


@pytest.mark.parametrize(
    ("made", "step"),
    [
        *((operator(role, 1024, rows, type_name="Q4_K"), step)
          for role, rows, step in (("ffn_up", 8192, 128), ("ffn_up", 8160, 32), ("ffn_up", 8224, 32),
                                   ("attn_k", 1024, 32), ("output", 128256, 128))),
        (operator("ffn_down", 14336, 4096), 32),
        (operator("ffn_down", 14336, 4096, type_name="Q4_K"), 256),
        (replace(operator("ffn_up", 1024, 16384), gate_up=True), 128),
        (replace(operator("ffn_up", 1024, 8192), gate_up=True), 32),
        (operator("ffn_up", 1024, 16384, type_name="F16"), 32),
    ],
)  # fmt: skip
def test_plans_cut_long_weights_between_tiles_of_rows_and_others_anywhere(made: Operator, step: int) -> None:
    """Steps through K are blocks of the type, and of halves whole tiles of each; a plan may be cut otherwise."""
    assert cut_step(made) == step and step % cut_granularity(made) == 0
    extent = cut_extent(made)
    cut = extent // 2 // cut_granularity(made) * cut_granularity(made) - cut_granularity(made)
    assert slice_counts(made, placed("x", gg=1 - cut / extent)) == (cut, 0, extent - cut)


@given(st.data(), st.sampled_from(sorted(MUL_MAT_TYPES)), st.sampled_from(["ffn_up", "ffn_down"]))
def test_every_count_survives_as_a_fraction(data: st.DataObject, type_name: str, role: str) -> None:
    block = lcm(GGML_TYPES_BY_NAME[type_name].block_size, 32)
    extent = data.draw(st.integers(1, 300)) * block
    k, n = (extent, 64) if role == "ffn_down" else (64 * block, extent)
    made = operator(role, k, n, type_name=type_name)
    step = cut_granularity(made)
    cc = data.draw(st.integers(0, extent // step)) * step
    cg = data.draw(st.integers(0, (extent - cc) // step)) * step
    gg = extent - cc - cg
    place = replace(placed("x", gg=gg / extent, cg=cg / extent), cc=cc / extent)
    assert slice_counts(made, place) == (cc, cg, gg)


ODD = operator("output", EMBD, 1000, type_name="F16")


def test_gg_takes_the_rest_of_an_odd_extent() -> None:
    found = [slice_counts(ODD, placed("x", gg=gg, cg=cg)) for gg, cg in ((0.36, 0), (0, 0), (1, 0), (0, 0.36))]
    assert found == [(640, 0, 360), (1000, 0, 0), (0, 0, 1000), (640, 360, 0)]


@pytest.mark.parametrize(
    ("gg", "cg", "cc", "message"),
    [
        (0.5, 0.0, 0.5, "cc = 0.5 is not a multiple of its split granularity, 32 of 1000 rows; the nearest is 0.512"),
        (0.0, 1 / 3, 2 / 3, "cc = 0.666666667"),
        (0.0, 0.004, 0.996, "32 of 1000 rows; the nearest is 0.992"),
        (0.001, 0.0, 0.999, "the nearest is 0.992"),
        (0.1001, 0.0, 0.8999, "cc = 0.8999"),
        (0.872, 0.0, 0.064, "(64, 0, 872) of 1000 rows"),
        (1.032, -0.032, 0.0, "(0, -32, 1032) of 1000 rows"),
    ],
)
def test_fractions_that_are_no_such_counts_are_refused(gg: float, cg: float, cc: float, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        slice_counts(ODD, replace(placed("x", gg=gg, cg=cg), cc=cc))


def test_of_a_weight_the_device_has_its_slice_or_whole_experts() -> None:
    made = operator("ffn_up_exps", 1024, 4096, n_expert=8)
    assert device_share(made, placed(made.name, gg=0.25, cg=0.5)) == 0.25
    hot = placed(made.name, hot=(0, 7))
    assert device_share(made, hot) == 2 / 8 and hot_bytes(made, hot) == 2 * made.bytes // 8
    check_hot_experts(made, hot)
    with pytest.raises(PlanError):
        check_hot_experts(made, placed(made.name, hot=(0, 8)))


#
# blocks that are split as one, and what they take on the device
#


def test_an_ffn_is_one_block_and_everything_else_is_alone() -> None:
    assert groups(list(weights_of(model_info(n_layer=1)))) == [
        ("attn_q",), ("attn_k",), ("attn_v",), ("attn_output",), ("ffn_gate", "ffn_up", "ffn_down"), ("output",)
    ]  # fmt: skip
    assert groups(ffn(0) + ffn(1)) == [("ffn_gate", "ffn_up", "ffn_down")] * 2
    assert groups(ffn(0)[1:]) == [("ffn_up", "ffn_down")]
    assert groups(ffn(0), [0, 32, 32]) == [("ffn_up",), ("ffn_down",)], "the gate is elsewhere, and so is the GLU"
    assert groups(ffn(0)[:2]) == [("ffn_gate", "ffn_up")], "down is elsewhere"
    assert groups(ffn(0), [32, 32, 64]) == [("ffn_gate", "ffn_up"), ("ffn_down",)]
    fused = [replace(operator("ffn_up", EMBD, 2 * FF), gate_up=True), ffn(0)[2]]
    assert groups(fused) == [("ffn_up", "ffn_down")]
    shared = [operator(f"{op.role}_shexp", *op.shape[:2]) for op in ffn(0)]
    assert groups(experts() + shared) == [
        ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
    ]  # fmt: skip


def test_what_cannot_run_as_one_is_split_operator_by_operator() -> None:
    alone = [("ffn_gate",), ("ffn_up",), ("ffn_down",)]
    assert groups(ffn(0), [64, 32, 32]) == alone, "cut at different elements"
    wide = [ffn(0)[0], operator("ffn_up", EMBD, 2 * FF), ffn(0)[2]]
    assert groups(wide) == alone, "of another width"
    assert len(groups(experts(biased=True))) == 3, "a bias of each expert comes between"
    assert groups(ffn(0), [32, 0, 32]) == [("ffn_gate",), ("ffn_down",)], "up is not split"


@pytest.mark.parametrize(
    ("op", "possible"),
    [
        (ffn(0)[0], True),
        (operator("output", EMBD, 3200, layer=None), True),
        (operator("token_embd", EMBD, 3200, layer=None), False),
        (operator("attn_k_b", 64, 256, n_expert=8), False),
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
    assert block_bytes(block, 256, 7) == (EMBD + 3 * 256) * 7 * 4, "the result takes the place of gate and up"
    assert block_bytes(block, 32, 7) == (2 * EMBD + 3 * 32) * 7 * 4, "where it fits there: what was sent stays"
    assert block_bytes(block, 0, 7, 256) == block_bytes(block, 256, 7)
    assert block_bytes(block, 256, 7, 512) == (2 * EMBD + 3 * 512) * 7 * 4, "GG's result is kept"
    assert block_bytes(block, 512, 7, 32) == (EMBD + 3 * 512) * 7 * 4
    (routed,) = split_blocks(experts(), [32] * 3)
    assert (routed.upload_bytes(256, 7), routed.download_bytes(256, 7)) == (7 * (EMBD + 2) * 4, 7 * 2 * EMBD * 4)
    assert routed.n_summed(7) == 1, "too few bytes would be saved"
    large = SUM_BYTES // (EMBD * 4)  # one of two results of each token need not come back
    assert (routed.n_summed(large - 1), routed.n_summed(large)) == (1, 2)
    assert routed.upload_bytes(256, large) == large * (EMBD + 2 + 2) * 4, "ids and routing weights"
    assert routed.download_bytes(256, large) == large * EMBD * 4
    assert routed.download_bytes(256, 3, large) == 3 * EMBD * 4, "of a large batch a few tokens (n_g)"
    results, hidden_values = large * 3 * EMBD * 4, large * 3 * 2 * 4
    assert block_bytes(routed, 1, large) == routed.upload_bytes(1, large) + results + hidden_values, "the sum beside"
    assert block_bytes(routed, FF, large) == routed.upload_bytes(1, large) + large * 3 * 2 * FF * 4
    (down,) = split_blocks(experts()[2:], [32])
    assert down.download_bytes(256, large) == large * EMBD * 4
    (biased,) = split_blocks(experts(biased=True)[2:], [32])
    assert biased.download_bytes(32, large) == large * 2 * 32 * 4, "biases are added first"
    assert ffn_block(experts(biased=True), range(3)).n_summed(large) == 2, "and by themselves where they are hot"
    (rows,) = split_blocks([operator("output", EMBD, 3200, layer=None)], [32])
    assert (rows.upload_bytes(320, 7), rows.download_bytes(320, 7)) == (7 * EMBD * 4, 7 * 320 * 4)
    assert block_bytes(rows, 320, 7, 64) == (EMBD + 320 + 64) * 7 * 4
    assert block_bytes(rows, 320, 512) == block_bytes(rows, 320, LOGITS_CHUNK), "of a few tokens' logits at once"
    biased_rows = replace(operator("output", EMBD, 3200, layer=None), biased=True)
    (unchunked,) = split_blocks([biased_rows], [32])
    assert block_bytes(unchunked, 320, 512) == ((EMBD + 320) * 512 + 320) * 4, "a bias is sent, and all tokens at once"
    (cols,) = split_blocks([ffn(0)[2]], [32])
    assert (cols.upload_bytes(256, 7), cols.download_bytes(256, 7)) == (7 * 256 * 4, 7 * EMBD * 4)
    (halves,) = split_blocks([replace(operator("ffn_up", EMBD, 2 * FF), gate_up=True)], [32])
    assert (halves.extent, halves.download_bytes(256, 7)) == (FF, 7 * 256 * 4), "the GLU has been applied"
    (hidden,) = split_blocks(ffn(0)[:2], [256] * 2)
    assert (hidden.upload_bytes(256, 7), hidden.download_bytes(256, 7)) == (7 * EMBD * 4, 7 * 256 * 4)
    assert block_bytes(hidden, 256, 7, 512) == (EMBD + 256 + 3 * 512) * 7 * 4
    (without_gate,) = split_blocks([ffn(0)[1], ffn(0)[2]], [32] * 2)
    assert block_bytes(without_gate, 256, 7) == (EMBD + 256 + EMBD) * 7 * 4, "the activation takes up's place"
    assert slice_weights(ffn(0) + ffn(1), [256] * 3 + [64] * 3) == block.weight_bytes(256) + block.weight_bytes(64)
    assert slice_weights(ffn(0), []) == 0


#
# n_g
#


def test_between_two_lengths_the_cpu_gets_whole_groups_of_tokens() -> None:
    table = ((16, 3), (48, 20), (50, 15))
    assert [n_g_at(table, n) for n in (15, 16, 17, 19, 32, 48, 49, 50)] == [0, 3, 1, 3, 12, 20, 17, 15]
    assert n_g_at(((8, 0), (16, 15)), 12) == 8 and n_g_at(((8, 7), (16, 15)), 12) == 11, "one token is a group"
    assert n_g_at((), 512) == 0


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda one: one[0]),
    st.integers(1, 1200),
)
def test_no_batch_has_more_tokens_on_the_device_than_memory_is_kept_for(
    points: list[tuple[int, float]], n_ubatch: int
) -> None:
    table = tuple((n, int(share * n)) for n, share in sorted(points))
    most = most_n_g(table, n_ubatch)
    assert all(0 <= n_g_at(table, n) <= min(n, most) for n in range(1, n_ubatch + 1))
