"""Shapes of the models that tests, matrices and the papers use, beside the popular ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oallama.model.shapes import POPULAR, QKV, ModelShape, Ne, gated_ffn, glm4moe, llama, qwen2, shape


def phimoe(
    n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_vocab: int, n_ctx: int, n_expert: int
) -> ModelShape:
    """Mixtral's matrices, and biases of everything but the experts; a long context by factors of its RoPE."""
    return llama(
        n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx, n_expert=n_expert, rope_base=1e4, arch="phimoe",
        biased=(*QKV, "attn_output", "attn_norm", "ffn_norm"),
        metadata={"rope.scaling.original_context_length": min(n_ctx, 4096)},
        factors=dict.fromkeys(("rope_factors_long", "rope_factors_short"), n_embd // n_head // 2),
        last_biases={"output_norm": n_embd, "output": n_vocab},
    )  # fmt: skip


def minicpm3() -> ModelShape:
    """MiniCPM3-4B: latent attention, unabsorbed; a head has 64 plain and 32 rotated places in K, 64 in V."""
    n_embd, n_ff, n_head, q_rank, kv_rank, nope, rope, value = 2560, 6400, 40, 768, 256, 64, 32, 64
    matrices: dict[str, Ne] = {
        "attn_q_a": (n_embd, q_rank),
        "attn_q_b": (q_rank, n_head * (nope + rope)),
        "attn_kv_a_mqa": (n_embd, kv_rank + rope),
        "attn_kv_b": (kv_rank, n_head * (nope + value)),
        "attn_output": (n_head * value, n_embd),
        "ffn_gate": (n_embd, n_ff),
        "ffn_up": (n_embd, n_ff),
        "ffn_down": (n_ff, n_embd),
    }
    return ModelShape(
        "minicpm3", 62, n_embd, n_ff, n_head, n_head, 73448, 32768,
        matrices=matrices,
        vectors={"attn_norm": n_embd, "attn_q_a_norm": q_rank, "attn_kv_a_norm": kv_rank, "ffn_norm": n_embd},
        metadata={
            "attention.q_lora_rank": q_rank, "attention.kv_lora_rank": kv_rank, "attention.key_length": nope + rope,
            "attention.value_length": value, "rope.dimension_count": rope,
        },
    )  # fmt: skip


def qwen2moe(*sizes: Any, n_ff_shared: int, **experts: Any) -> ModelShape:
    """Qwen2 with small experts and one that every token uses besides. n_ff: what a dense model would have; unused."""
    n_embd = sizes[1]
    return shape(
        "qwen2moe", *sizes, **experts, biased=QKV, matrices=gated_ffn(n_embd, n_ff_shared, "_shexp"),
        vectors={"ffn_gate_inp_shexp": n_embd}, metadata={"expert_shared_feed_forward_length": n_ff_shared},
    )  # fmt: skip


def mtp(n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_vocab: int, n_ctx: int) -> ModelShape:
    """GLM 4's layers with dense FFNs, and a last block more that drafts (MTP), whose experts compute as much for each
    token. Qwen 3.5 without recurrent layers would be dense as well, but aborts llama.cpp b11549."""
    model_shape = glm4moe(
        n_layer + 1, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx, 1e6, head_dim=n_embd // n_head, n_dense=n_layer,
        n_expert=4, n_expert_used=3, n_ff_expert=n_ff // 4,
    )  # fmt: skip
    block = {
        "nextn.eh_proj": (2 * n_embd, n_embd), "nextn.enorm": (n_embd,), "nextn.hnorm": (n_embd,),
        "nextn.shared_head_norm": (n_embd,),
    }  # fmt: skip
    return replace(model_shape, mtp=block, metadata={**model_shape.metadata, "nextn_predict_layers": 1})


KNOWN: dict[str, ModelShape] = {
    "llama3-8b": llama(32, 4096, 14336, 32, 8, 128256, 8192, rope_base=500000.0),
    "llama2-13b": llama(40, 5120, 13824, 40, 40, 32000),
    "llama2-70b": llama(80, 8192, 28672, 64, 8, 32000),
    "mixtral-8x22b": llama(56, 6144, 16384, 48, 8, 32768, 65536, n_expert=8, rope_base=1e6),
    "qwen1.5-14b": qwen2(40, 5120, 13696, 40, 40, 152064, 32768, 1e6),
    "qwq-32b": qwen2(64, 5120, 27648, 40, 8, 152064, 32768, 1e6),
    "qwen2-57b-a14b": qwen2moe(
        28, 3584, 18944, 28, 4, 151936, 32768, 1e6,
        n_expert=64, n_expert_used=8, n_ff_expert=2560, n_ff_shared=20480,
    ),
    "phi3.5-moe": phimoe(32, 4096, 6400, 32, 8, 32064, 131072, n_expert=16),
    "minicpm3-4b": minicpm3(),
    "llama-1b": llama(16, 2048, 8192, 32, 8, 32000),
    "moe-2.7b": llama(12, 2048, 4096, 32, 8, 32000, n_expert=8),
    "mtp-8b": mtp(32, 4096, 14336, 32, 8, 128256, 8192),
    "mtp-mini": mtp(8, 768, 2048, 12, 4, 8192, 4096),
    "moe-mini": llama(8, 512, 1024, 8, 4, 8192, n_expert=8),
    **POPULAR,
}  # fmt: skip
"""By the names that --like takes. The 1b, 2.7b, mini and mtp ones are nobody's, for machines without a GPU."""
