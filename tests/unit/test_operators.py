"""The operator list where a test can say what it must be. What graphs read, in which order, of 123 architectures:
tests/golden/test_operator_graphs.py; of llama.cpp itself: tests/e2e/test_operator_trace.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_factory import write_gguf
from gguf_factory.raw import tiny_llama

from oallama.core.types import Operator
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.model.roles import tensor_role


def listed(path: Path) -> dict[str, Operator]:
    return {operator.name: operator for operator in operators(read_gguf(path))}


def test_one_operator_in_full(tmp_path: Path) -> None:
    found = listed(write_gguf(tmp_path / "model.gguf", "llama", weight_type="Q4_K"))
    assert found["blk.1.ffn_down.weight"] == Operator(
        name="blk.1.ffn_down.weight", layer=1, role="ffn_down", op="MUL_MAT", type="Q4_K", shape=(512, 256, 1),
        bytes=512 * 256 // 256 * 144, active_fraction=1.0,
    )  # fmt: skip


def test_a_tied_embedding_is_the_output_once(tmp_path: Path) -> None:
    tied = list(listed(write_gguf(tmp_path / "tied.gguf", "llama-tied")).values())
    assert [operator.name for operator in tied].count("token_embd.weight") == 1
    last = tied[-1]
    assert (last.role, last.layer, last.shape) == ("token_embd", None, (256, 320, 1))
    untied = list(listed(write_gguf(tmp_path / "untied.gguf", "llama")).values())
    assert untied[-1].role == "output"
    assert "token_embd" not in {operator.role for operator in untied}


def test_experts(tmp_path: Path) -> None:
    found = listed(write_gguf(tmp_path / "model.gguf", "qwen2moe", n_expert=8, n_expert_used=2))
    routed = found["blk.0.ffn_up_exps.weight"]
    assert (routed.op, routed.shape, routed.n_expert_used) == ("MUL_MAT_ID", (256, 256, 8), 2)
    assert routed.active_fraction == 2 / 8
    assert routed.bytes == 2 * 256 * 256 * 8
    router, shared = found["blk.0.ffn_gate_inp.weight"], found["blk.0.ffn_up_shexp.weight"]
    for operator in (router, shared):
        assert (operator.op, operator.active_fraction, operator.n_expert_used) == ("MUL_MAT", 1.0, 1)
    assert found["blk.0.ffn_gate_inp_shexp.weight"].shape == (256, 1, 1), "a vector that runs as a mul-mat"


def test_experts_used_differ_by_layer(tmp_path: Path) -> None:
    found = listed(write_gguf(tmp_path / "model.gguf", "llama-moe", metadata={"llama.expert_used_count": [2, 4]}))
    assert [found[f"blk.{i}.ffn_up_exps.weight"].n_expert_used for i in (0, 1)] == [2, 4]


def test_absorbed_latent_attention_is_one_matrix_a_head(tmp_path: Path) -> None:
    found = listed(write_gguf(tmp_path / "model.gguf", "deepseek2", n_head=4))
    assert found["blk.0.attn_k_b.weight"].shape == (64, 256, 4)
    assert found["blk.0.attn_v_b.weight"].shape == (256, 64, 4)
    assert found["blk.0.attn_k_b.weight"].op == "MUL_MAT"


def test_blocks_that_predict_ahead_are_left_out(tmp_path: Path) -> None:
    g = tiny_llama()
    g.set("llama.block_count", 2)
    g.set("llama.nextn_predict_layers", 1)
    g.add("blk.1.nextn.eh_proj.weight", 128, 64)
    g.add("blk.1.attn_q.weight", 64, 64)
    found = listed(g.write(tmp_path / "model.gguf"))
    assert {operator.layer for operator in found.values()} == {0, None}


def test_an_unknown_architecture_is_like_llama_and_an_encoder_without_output_has_none(tmp_path: Path) -> None:
    def untied(arch: str) -> list[str]:
        g = tiny_llama()
        g.tensors.remove(g.tensor("output.weight"))
        g.metadata = {key.replace("llama.", f"{arch}."): value for key, value in g.metadata.items()}
        g.set("general.architecture", arch, "string")
        return list(listed(g.write(tmp_path / "model.gguf")))

    assert untied("newer") == untied("llama") and untied("llama")[-1] == "token_embd.weight"
    assert sorted(untied("bert")) == sorted(untied("llama")[:-1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.17.attn_q.weight", (17, "attn_q", "weight")),
        ("blk.0.ffn_down_exps.bias", (0, "ffn_down_exps", "bias")),
        ("blk.3.nextn.eh_proj.weight", (3, "nextn.eh_proj", "weight")),
        ("blk.3.ssm_a", (3, "ssm_a", "")),
        ("dec.blk.2.attn_q.weight", (2, "dec.attn_q", "weight")),
        ("output.weight", (None, "output", "weight")),
        ("blk.x.attn_q.weight", (None, "blk.x.attn_q", "weight")),
        ("weight", (None, "weight", "")),
    ],
)
def test_names_are_taken_apart(name: str, expected: tuple[int | None, str, str]) -> None:
    role = tensor_role(name)
    assert (role.layer, role.role, role.suffix) == expected
