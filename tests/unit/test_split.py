"""Where operators may be cut: axes by role, granularity by type, and fractions as exact counts of elements."""

from __future__ import annotations

import re
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest
from gguf_factory import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from worlds import placed, weight

from oallama.core.errors import PlanError
from oallama.core.ggml_types import GGML_TYPES_BY_NAME, MUL_MAT_TYPES
from oallama.core.types import Operator, OperatorPlacement
from oallama.model.cut import cut_axis, cut_extent, cut_granularity, cut_step
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.plan.split import check_hot_experts, device_share, hot_bytes, slice_counts


def operator(
    role: str, weight_type: str = "Q4_0", shape: tuple[int, int, int] = (1024, 4096, 1), **more: bool
) -> Operator:
    k, n, e = shape
    made = weight(role=role, k=k, n=n, layer=0, n_expert=e if role.endswith("_exps") else 0, type_name=weight_type)
    return replace(made, **more)


def slices(of: Operator, *, gg: float, cg: float = 0.0, cc: float | None = None) -> tuple[int, int, int]:
    return slice_counts(of, OperatorPlacement("x", gg=gg, cg=cg, cc=1 - gg - cg if cc is None else cc))


@pytest.mark.parametrize(
    ("role", "axis"),
    [
        ("ffn_gate", "rows"), ("ffn_up", "rows"), ("ffn_down", "cols"), ("ffn_down_exps", "cols"),
        ("ffn_down_shexp", "cols"), ("enc.ffn_down", "cols"), ("dec.ffn_up", "rows"), ("attn_output", "rows"),
        ("attn_qkv", "rows"), ("output", "rows"), ("ffn_latent_down", "rows"), ("hc_ffn_down", "rows"),
    ],
)  # fmt: skip
def test_only_the_second_mul_mat_of_an_ffn_is_cut_through_k(role: str, axis: str) -> None:
    made = operator(role)
    assert cut_axis(made) == axis
    assert cut_extent(made) == (1024 if axis == "cols" else 4096)


def test_gate_and_up_in_one_weight_are_cut_in_both_halves() -> None:
    made = operator("ffn_up", gate_up=True)
    assert (cut_axis(made), cut_extent(made), cut_granularity(made)) == ("halves", 2048, 32)


def test_experts_with_biases_run_one_by_one_so_down_is_cut_by_rows() -> None:
    assert cut_axis(operator("ffn_down_exps", biased=True)) == "rows"
    assert cut_axis(operator("ffn_down", biased=True)) == "cols"


@pytest.mark.parametrize("weight_type", sorted(MUL_MAT_TYPES))
def test_granularity_keeps_quantisation_blocks_and_row_groups_whole(weight_type: str) -> None:
    block = GGML_TYPES_BY_NAME[weight_type].block_size
    assert cut_granularity(operator("ffn_up", weight_type)) == 32
    assert cut_granularity(operator("ffn_down", weight_type)) == lcm(block, 32)


@pytest.mark.parametrize(
    ("role", "rows", "step"),
    [("ffn_up", 8192, 128), ("ffn_up", 8160, 32), ("ffn_up", 8224, 32), ("attn_k", 1024, 32), ("output", 128256, 128)],
)
def test_plans_cut_long_weights_between_tiles_of_rows_and_others_anywhere(role: str, rows: int, step: int) -> None:
    made = operator(role, "Q4_K", (1024, rows, 1))
    assert cut_step(made) == step and step % cut_granularity(made) == 0
    cut = rows - 32 if rows % 128 == 0 else rows // 2 // 32 * 32  # a plan may be cut otherwise
    assert slices(made, gg=1 - cut / rows, cc=cut / rows) == (cut, 0, rows - cut)


def test_steps_through_k_are_blocks_and_of_halves_whole_tiles_of_each() -> None:
    assert cut_step(operator("ffn_down", "Q4_0", (14336, 4096, 1))) == 32
    assert cut_step(operator("ffn_down", "Q4_K", (14336, 4096, 1))) == 256
    assert cut_step(operator("ffn_up", "Q4_0", (1024, 16384, 1), gate_up=True)) == 128
    assert cut_step(operator("ffn_up", "Q4_0", (1024, 8192, 1), gate_up=True)) == 32
    assert cut_step(operator("ffn_up", "F16", (1024, 16384, 1))) == 32


@pytest.mark.parametrize(
    ("arch", "fused"),
    [("llama", set()), ("phi3", {"ffn_up"}), ("glm4", {"ffn_up"}), ("gptneox", set()), ("qwen2moe", set())],
)
def test_fused_gate_and_up_are_known_by_their_shapes(arch: str, fused: set[str], tmp_path: Path) -> None:
    found = operators(read_gguf(write_gguf(tmp_path / "model.gguf", arch)))
    assert {o.role for o in found if cut_axis(o) == "halves"} == fused
    for o in found:
        assert cut_extent(o) * (2 if o.gate_up else 1) in o.shape


def test_biases_are_seen(tmp_path: Path) -> None:
    plain = operators(read_gguf(write_gguf(tmp_path / "llama.gguf", "llama")))
    assert not any(o.biased for o in plain)
    neox = operators(read_gguf(write_gguf(tmp_path / "neox.gguf", "gptneox")))
    assert {o.role for o in neox if o.biased} >= {"ffn_up", "ffn_down"}


@given(st.data(), st.sampled_from(sorted(MUL_MAT_TYPES)), st.sampled_from(["ffn_up", "ffn_down"]))
def test_every_count_survives_as_a_fraction(data: st.DataObject, weight_type: str, role: str) -> None:
    block = lcm(GGML_TYPES_BY_NAME[weight_type].block_size, 32)
    extent = data.draw(st.integers(1, 300)) * block
    made = operator(role, weight_type, (extent, 64, 1) if role == "ffn_down" else (64 * block, extent, 1))
    step = cut_granularity(made)
    cc = data.draw(st.integers(0, extent // step)) * step
    cg = data.draw(st.integers(0, (extent - cc) // step)) * step
    gg = extent - cc - cg
    assert slices(made, gg=gg / extent, cg=cg / extent, cc=cc / extent) == (cc, cg, gg)


def test_gg_takes_the_rest_of_an_odd_extent() -> None:
    odd = operator("output", "F16", (256, 1000, 1))
    assert slices(odd, gg=0.36) == (640, 0, 360)
    assert slices(odd, gg=0.0) == (1000, 0, 0)
    assert slices(odd, gg=1.0) == (0, 0, 1000)
    assert slices(odd, gg=0.0, cg=0.36) == (640, 360, 0)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ((0.5, 0.0, 0.5), "cc = 0.5 is no multiple of its split granularity, 32 of 1000 rows; the nearest is 0.512"),
        ((0.0, 1 / 3, 2 / 3), "cc = 0.666666667"),
        ((0.0, 0.004, 0.996), "32 of 1000 rows; the nearest is 0.992"),
        ((0.001, 0.0, 0.999), "the nearest is 0.992"),
        ((0.1001, 0.0, 0.8999), "cc = 0.8999"),
        ((0.872, 0.0, 0.064), "(64, 0, 872) of 1000 rows"),
        ((1.032, -0.032, 0.0), "(0, -32, 1032) of 1000 rows"),
    ],
)
def test_fractions_that_are_no_such_counts_are_refused(fractions: tuple[float, float, float], message: str) -> None:
    odd = operator("output", "F16", (256, 1000, 1))
    with pytest.raises(PlanError, match=re.escape(message)):
        slices(odd, gg=fractions[0], cg=fractions[1], cc=fractions[2])


def test_of_a_weight_the_device_has_its_slice_or_whole_experts() -> None:
    made = operator("ffn_up_exps", shape=(1024, 4096, 8))
    assert device_share(made, placed(made.name, gg=0.25, cg=0.5)) == 0.25
    hot = placed(made.name, hot=(0, 7))
    assert device_share(made, hot) == 2 / 8 and hot_bytes(made, hot) == 2 * made.bytes // 8
    check_hot_experts(made, hot)
    with pytest.raises(PlanError):
        check_hot_experts(made, placed(made.name, hot=(0, 8)))
