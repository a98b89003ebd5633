"""Blocks that are split as one, and what they take on the device: as the split back end has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import model_info, weight, weights_of

from oallama.core.types import Operator
from oallama.cost.blocks import LOGITS_CHUNK, SUM_BYTES, can_split, ffn_block, slice_weights, split_blocks

EMBD, FF = 256, 1024


def operator(role: str, k: int = EMBD, n: int = FF, **more: object) -> Operator:
    return weight(role=role, k=k, n=n, **{"layer": 0, **more})  # type: ignore[arg-type]


def ffn(layer: int) -> list[Operator]:
    return [
        *(operator(role, layer=layer) for role in ("ffn_gate", "ffn_up")),
        operator("ffn_down", FF, EMBD, layer=layer),
    ]


def experts(biased: bool = False) -> list[Operator]:
    made = (operator(f"{o.role}_exps", *o.shape[:2], n_expert=8, used=2) for o in ffn(0))
    return [replace(o, biased=biased) for o in made]


def groups(ops: list[Operator], gg: list[int] | None = None) -> list[tuple[str, ...]]:
    return [tuple(ops[i].role for i in block.operators) for block in split_blocks(ops, gg or [32] * len(ops))]


def test_an_ffn_is_one_block_and_everything_else_is_alone() -> None:
    assert groups(list(weights_of(model_info(n_layer=1)))) == [
        ("attn_q",), ("attn_k",), ("attn_v",), ("attn_output",), ("ffn_gate", "ffn_up", "ffn_down"), ("output",)
    ]  # fmt: skip
    assert groups(ffn(0) + ffn(1)) == [("ffn_gate", "ffn_up", "ffn_down")] * 2
    assert groups(ffn(0)[1:]) == [("ffn_up", "ffn_down")]
    fused = [replace(operator("ffn_up", EMBD, 2 * FF), gate_up=True), ffn(0)[2]]
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
    (rows,) = split_blocks([operator("output", EMBD, 3200, layer=None)], [32])
    assert (rows.upload_bytes(320, 7), rows.download_bytes(320, 7)) == (7 * EMBD * 4, 7 * 320 * 4)
    assert rows.staging_bytes(320, 7, 64) == (EMBD + 320 + 64) * 7 * 4
    assert rows.staging_bytes(320, 512) == rows.staging_bytes(320, LOGITS_CHUNK), "of a few tokens' logits at once"
    (cols,) = split_blocks([ffn(0)[2]], [32])
    assert (cols.upload_bytes(256, 7), cols.download_bytes(256, 7)) == (7 * 256 * 4, 7 * EMBD * 4)
    (halves,) = split_blocks([replace(operator("ffn_up", EMBD, 2 * FF), gate_up=True)], [32])
    assert (halves.extent, halves.download_bytes(256, 7)) == (FF, 7 * 2 * 256 * 4)
    assert slice_weights(ffn(0) + ffn(1), [256] * 3 + [64] * 3) == block.weight_bytes(256) + block.weight_bytes(64)
    assert slice_weights(ffn(0), []) == 0
