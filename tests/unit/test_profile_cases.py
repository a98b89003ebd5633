"""What is measured for a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oallama.core.profile import Case
from oallama.core.types import ModelInfo, MulMat, Operator
from oallama.core.units import MIB
from oallama.profile.wanted import (
    required,
    rest_label,
    rest_ways,
    too_slow,
    wanted,
    working_set,
)


def model(n_layer: int = 2) -> ModelInfo:
    return ModelInfo(
        path="m.gguf", arch="llama", name="m", n_layer=n_layer, n_embd=256, n_ff=512, n_head=8, n_head_kv=2,
        n_embd_head_k=32, n_embd_head_v=32, n_expert=0, n_expert_used=0, n_vocab=1000, n_ctx_train=512,
        file_bytes=1, fingerprint="f",
    )  # fmt: skip


def operator(name: str, layer: int | None, shape: tuple[int, int, int], n_bytes: int, **more: object) -> Operator:
    values = {"role": name.split(".")[-1], "op": "MUL_MAT", "type": "Q4_0", "active_fraction": 1.0, **more}
    return Operator(name=name, layer=layer, shape=shape, bytes=n_bytes, **values)  # type: ignore[arg-type]


LAYERS = [
    operator(f"blk.{i}.{role}", i, shape, n_bytes)
    for i in range(2)
    for role, shape, n_bytes in (
        ("ffn_gate", (256, 512, 1), 73728),
        ("ffn_up", (256, 512, 1), 73728),
        ("ffn_down", (512, 256, 1), 73728),
        ("attn_q", (256, 256, 1), 36864),
    )
]
OUTPUT = operator("output", None, (256, 1000, 1), 144000)


def test_equal_operators_are_measured_once() -> None:
    want = wanted(model(), [*LAYERS, OUTPUT], (32, 1, 32), llc_bytes=MIB)
    shapes = [(256, 256, 1), (256, 512, 1), (512, 256, 1), (256, 1000, 1)]
    assert [(s.shape, n) for s, n, _ in want.mul_mats] == [(shape, n) for shape in shapes for n in (1, 32)]
    assert len(required(want, None)) == 8 + 6
    assert [(s.shape, n) for s, n, _ in want.on_cpu] == [(shape, n) for shape in shapes[:3] for n in (4, 8)]
    on_device = [case.n_tokens for case in required(want, "CUDA0") if case.device == "CUDA0"]
    assert sorted(on_device) == [1] * 4 + [32] * 4
    assert len(required(want, "CUDA0")) == 16 + 6


def test_the_output_matrix_is_not_measured_at_prompt_sized_batches() -> None:
    want = wanted(model(), [*LAYERS, OUTPUT], (1, 32, 512), llc_bytes=MIB)
    assert [n for s, n, _ in want.mul_mats if s.shape == (256, 1000, 1)] == [1, 32]
    assert [n for s, n, _ in want.mul_mats if s.shape == (256, 512, 1)] == [1, 32, 512]
    first = operator("per_layer_model_proj", None, (256, 768, 1), 110592)
    before = wanted(model(), [first, *LAYERS, OUTPUT], (1, 32, 512), llc_bytes=MIB)
    assert [n for s, n, _ in before.mul_mats if s.shape == (256, 768, 1)] == [1, 32, 512], "it sees all tokens"
    only_large = wanted(model(), [OUTPUT], (512,), llc_bytes=MIB)
    assert [n for _, n, _ in only_large.mul_mats] == [512]


def test_rest_covers_every_batch_fresh_and_at_two_depths_that_hold_it() -> None:
    want = wanted(model(), LAYERS, (1, 512), llc_bytes=MIB)
    tiled = ((64, 64), (64, 512), (64, 2048))
    assert want.rest == ((1, 32), (1, 512), (1, 2048), *tiled, (512, 512), (512, 2048))
    small = tuple((n, n_kv) for n in (1, 32) for n_kv in (32, 256, 1024))
    assert wanted(model(), LAYERS, (1, 32), llc_bytes=MIB).rest == small
    assert wanted(model(), LAYERS, (4096,), llc_bytes=MIB).rest == (*tiled, (512, 512), (512, 2048))


def test_rest_has_the_head_shape_and_the_activation_of_all_experts_in_use() -> None:
    shape = wanted(model(), LAYERS, (1,), llc_bytes=MIB).rest_shape
    assert (shape.n_head, shape.n_head_kv, shape.n_embd_head_k, shape.n_ff) == (8, 2, 32, 512)
    routed = {"op": "MUL_MAT_ID", "n_expert_used": 2, "active_fraction": 0.25, "role": "ffn_down_exps"}
    experts = [
        operator("a", 0, (128, 256, 8), 1, **routed),
        operator("b", 0, (64, 256, 1), 1, role="ffn_down_shexp"),
        operator("c", 1, (300, 256, 1), 1, role="ffn_down"),
    ]
    assert wanted(model(), experts, (1,), llc_bytes=MIB).rest_shape.n_ff == 2 * 128 + 64


@pytest.mark.parametrize("odd", [{"n_head": 0}, {"n_head_kv": 3}, {"n_embd_head_k": 33}, {"n_embd_head_v": 0}])
def test_layers_that_are_no_llama_block_have_no_rest_cases(odd: dict[str, int]) -> None:
    assert wanted(replace(model(), **odd), LAYERS, (1,), llc_bytes=MIB).rest == ()


@pytest.mark.parametrize(
    ("weight", "whole_model", "llc", "expected"),
    [
        (10 * MIB, 4000 * MIB, 32 * MIB, 128 * MIB),  # a large model: four times the cache
        (1 * MIB, 9 * MIB, 32 * MIB, 9 * MIB),  # a model in the cache: measured there
        (1 * MIB, 100 * MIB, 32 * MIB, 100 * MIB),  # larger than the cache, but not four times
        (100 * MIB, 4000 * MIB, 32 * MIB, 200 * MIB),  # at least two copies
        (300 * MIB, 4000 * MIB, 32 * MIB, 300 * MIB),  # cold all by itself
        (5 * MIB, 9 * MIB, 32 * MIB, 10 * MIB),  # two copies, though the model has only one
    ],
)
def test_working_set_in_decode(weight: int, whole_model: int, llc: int, expected: int) -> None:
    matrix = MulMat(op="MUL_MAT", type="F16", shape=(1024, weight // 2048, 1), n_expert_used=1)
    assert working_set(matrix, 1, whole_model, llc) == expected


def test_bytes_and_flops_of_a_dense_a_batched_and_a_routed_mul_mat() -> None:
    dense = MulMat(op="MUL_MAT", type="F16", shape=(64, 32, 1), n_expert_used=1)
    assert dense.flops(3) == 2 * 64 * 32 * 3
    assert dense.bytes_read(3) == 4096
    batched = MulMat(op="MUL_MAT", type="F16", shape=(64, 32, 8), n_expert_used=1)
    assert batched.flops(3) == 8 * dense.flops(3)
    assert batched.bytes_read(3) == 8 * 4096
    routed = MulMat(op="MUL_MAT_ID", type="F16", shape=(64, 32, 8), n_expert_used=2)
    assert routed.flops(1) == 2 * 64 * 32 * 2
    assert routed.bytes_read(1) == pytest.approx(2 * 4096)
    # two tokens of 2 in 8 experts meet in an expert with probability 1/4
    assert routed.bytes_read(2) == pytest.approx(8 * 4096 * (1 - 0.75**2))
    assert routed.bytes_read(512) == pytest.approx(8 * 4096)


def test_a_slow_layout_is_left_out_at_large_batches_only() -> None:
    mul_mat = LAYERS[0].mul_mat

    def case(layout: str, n_tokens: int, device: str = "CPU") -> Case:
        return Case(device=device, layout=layout, mul_mat=mul_mat, n_tokens=n_tokens, working_set_bytes=MIB)

    seconds = {("CPU_REPACK", 32): 1.9, ("CPU", 1): 9.0, ("CPU", 32): 2.5, ("AMX", 1): 1.0, ("AMX", 32): 1.0}
    known = {case(layout, n).key: value for (layout, n), value in seconds.items()}
    known[case("device", 32, "CUDA0").key] = 0.001
    known |= {case("CPU", 8).key: 1.0, case("AMX", 8).key: 1.0}  # smaller ones do not count
    assert too_slow(case("CPU", 512), known) == "2.5 times slower than AMX at 32 tokens"
    assert too_slow(case("CPU_REPACK", 512), known) is None  # 1.9 times
    assert too_slow(case("CPU_REPACK", 512), known | {case("CPU_REPACK", 32).key: 2.0}) is None, "no more than twice"
    repacked = known | {case("CPU_REPACK", 32).key: 0.5}
    assert too_slow(case("CPU", 512), repacked) == "5.0 times slower than CPU_REPACK at 32 tokens"
    assert too_slow(case("AMX", 512), known) is None
    assert too_slow(case("CPU", 32), known) is None
    assert too_slow(case("device", 512, "CUDA0"), known) is None
    assert too_slow(case("CPU", 512), {}) is None
    only_decode = {key: value for key, value in known.items() if key.n_tokens == 1}
    assert too_slow(case("CPU", 512), only_decode) is None  # decode says nothing about large batches


def test_a_rest_case_is_told_in_a_few_words() -> None:
    plain, flash = sorted(
        rest_ways(wanted(model(), LAYERS, (1,), llc_bytes=MIB).rest_shape), key=lambda s: s.flash_attn
    )
    assert rest_label("CPU", 1, 256, flash) == "CPU rest of a layer at 1 tokens, KV 256"
    assert rest_label("CPU", 1, 256, plain) == "CPU rest of a layer at 1 tokens, KV 256, no flash attention"
