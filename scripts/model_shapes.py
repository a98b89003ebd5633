"""Shapes of known models: architecture, sizes and matrices as their GGUFs have them, and nothing of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Ne = tuple[int, ...]  # ne[0] first, as ggml counts


@dataclass(frozen=True)
class ModelShape:
    """What a model with random weights is made from. Per layer: matrices by role, vectors of ones, biases of zeros.

    dense: the FFN of the first n_dense layers, where only later ones have experts. Outside layers: `factors` of ones,
    `last_biases` of zeros behind the last one; tied: the embedding is the output too. metadata: keys without the
    architecture's prefix, beside the sizes that every model has.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    n_ctx: int
    matrices: dict[str, Ne]
    vectors: dict[str, int]
    biases: Mapping[str, int | Ne] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    factors: dict[str, int] = field(default_factory=dict)
    last_biases: dict[str, int] = field(default_factory=dict)
    dense: dict[str, Ne] = field(default_factory=dict)
    n_dense: int = 0
    tied: bool = False

    def with_layers(self, n_layer: int | None) -> ModelShape:
        """The same with another number of layers."""
        return self if n_layer is None else replace(self, n_layer=n_layer)


def attention_and_ffn(
    n_embd: int, n_ff: int, n_head: int, n_head_kv: int, head_dim: int, n_expert: int = 0, n_ff_expert: int = 0
) -> dict[str, Ne]:
    """Matrices of a layer whose heads need not add up to its width; its FFN is n_expert experts, if there are any."""
    matrices: dict[str, Ne] = {
        "attn_q": (n_embd, n_head * head_dim),
        "attn_k": (n_embd, n_head_kv * head_dim),
        "attn_v": (n_embd, n_head_kv * head_dim),
        "attn_output": (n_head * head_dim, n_embd),
    }
    if n_expert:
        return matrices | {"ffn_gate_inp": (n_embd, n_expert)} | {
            f"{role}_exps": (*ne, n_expert) for role, ne in gated_ffn(n_embd, n_ff_expert).items()
        }  # fmt: skip
    return matrices | gated_ffn(n_embd, n_ff)


def gated_ffn(n_embd: int, n_ff: int, suffix: str = "") -> dict[str, Ne]:
    """Gate, up and down."""
    return {
        f"ffn_gate{suffix}": (n_embd, n_ff),
        f"ffn_up{suffix}": (n_embd, n_ff),
        f"ffn_down{suffix}": (n_ff, n_embd),
    }


QKV = ("attn_q", "attn_k", "attn_v")
NO_MATRICES: dict[str, Ne] = {}
NO_VECTORS: dict[str, int] = {}
NO_METADATA: dict[str, Any] = {}


def shape(
    arch: str, *sizes: Any, head_dim: int = 0, n_expert: int = 0, n_expert_used: int = 0, n_ff_expert: int = 0,
    biased: Iterable[str] = (), norms: Iterable[str] = ("attn_norm", "ffn_norm"), matrices: dict[str, Ne] = NO_MATRICES,
    vectors: dict[str, int] = NO_VECTORS, metadata: dict[str, Any] = NO_METADATA, **more: Any,
) -> ModelShape:  # fmt: skip
    """RMSNorm, attention and a gated FFN or experts, as most models have them.

    sizes: n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx and, where the file states it, RoPE's base.
    head_dim, n_ff_expert: where the file states the size of heads, and of experts beside a dense FFN's. biased: roles
    with biases; norms: of the model's width. matrices, vectors, metadata: beside these; more: other fields.
    """
    n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx, *rope_base = sizes
    of_heads = head_dim or n_embd // n_head
    all_matrices = (
        attention_and_ffn(n_embd, n_ff, n_head, n_head_kv, of_heads, n_expert, n_ff_expert or n_ff) | matrices
    )
    all_vectors = dict.fromkeys(norms, n_embd) | vectors
    keys: dict[str, Any] = {"rope.freq_base": rope_base[0]} if rope_base else {}
    if head_dim:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": n_expert_used}
        keys |= {"expert_feed_forward_length": n_ff_expert} if n_ff_expert else {}
    biases = {role: all_matrices[role][1:] if role in all_matrices else all_vectors[role] for role in biased}
    return ModelShape(
        arch, n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx, matrices=all_matrices, vectors=all_vectors,
        metadata=keys | metadata, biases=biases | more.pop("biases", {}), **more,
    )  # fmt: skip


def llama(
    n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_vocab: int, n_ctx: int = 4096,
    *, n_expert: int = 0, n_expert_used: int = 2, rope_base: float | None = None, arch: str = "llama", **more: Any,
) -> ModelShape:  # fmt: skip
    """Llama; Mixtral with experts. Raises ValueError for heads that do not divide the width."""
    if n_embd % n_head or n_head % n_head_kv:
        raise ValueError("n_embd must be a multiple of n_head, n_head of n_head_kv")
    return shape(
        arch, n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx, *([] if rope_base is None else [rope_base]),
        n_expert=n_expert, n_expert_used=n_expert_used,
        metadata={"rope.dimension_count": n_embd // n_head, **more.pop("metadata", {})}, **more,
    )  # fmt: skip


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


def opt(n_layer: int, n_embd: int, n_head: int) -> ModelShape:
    """OPT, which llama.cpp does not know, as the architecture that has its matrices: StarCoder2's layer has q, k, v and
    output of the same width, an FFN of up and down alone, LayerNorm and biases everywhere. Its positions are rotated,
    OPT's are learned."""
    n_ff, n_vocab = 4 * n_embd, 50272
    matrices: dict[str, Ne] = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (n_embd, n_embd))
    matrices |= {"ffn_up": (n_embd, n_ff), "ffn_down": (n_ff, n_embd)}
    vectors = {"attn_norm": n_embd, "ffn_norm": n_embd}
    return ModelShape(
        "starcoder2", n_layer, n_embd, n_ff, n_head, n_head, n_vocab, 2048,
        matrices=matrices, vectors=vectors,
        biases={role: ne[1] for role, ne in matrices.items()} | vectors,
        metadata={"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": n_embd // n_head},
        last_biases={"output_norm": n_embd},
    )  # fmt: skip


def qwen2(*sizes: Any) -> ModelShape:
    """Llama's matrices, and biases of q, k and v."""
    return shape("qwen2", *sizes, biased=QKV)


def qwen2moe(*sizes: Any, n_ff_shared: int, **experts: Any) -> ModelShape:
    """Qwen2 with small experts and one that every token uses besides. n_ff: what a dense model would have; unused."""
    n_embd = sizes[1]
    return shape(
        "qwen2moe", *sizes, **experts, biased=QKV, matrices=gated_ffn(n_embd, n_ff_shared, "_shexp"),
        vectors={"ffn_gate_inp_shexp": n_embd}, metadata={"expert_shared_feed_forward_length": n_ff_shared},
    )  # fmt: skip


def qwen3(*sizes: Any, head_dim: int = 128, **experts: Any) -> ModelShape:
    """Norms of each head's q and k; with experts Qwen3-MoE, all of whose layers have them (n_ff is unused then)."""
    norms = {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
    return shape("qwen3moe" if experts else "qwen3", *sizes, head_dim=head_dim, vectors=norms, **experts)


def gpt_oss(*sizes: Any, head_dim: int, window: int, **experts: Any) -> ModelShape:
    """Experts with biases, attention with biases and sinks, every other layer with a window."""
    _, _, n_ff, n_head, *_ = sizes
    roles = (*QKV, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return shape(
        "gpt-oss", *sizes, 150000.0, head_dim=head_dim, n_ff_expert=n_ff, **experts, biased=roles,
        norms=("attn_norm", "post_attention_norm"), vectors={"attn_sinks": n_head},
        metadata={
            "attention.sliding_window": window, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    )  # fmt: skip


def glm4moe(*sizes: Any, head_dim: int, n_ff_expert: int, n_dense: int = 1, **experts: Any) -> ModelShape:
    """Experts and one that every token uses besides, but for the first layers; without the layer that predicts the
    token after next. Half of each head is rotated."""
    _, n_embd, n_ff, *_ = sizes
    return shape(
        "glm4moe", *sizes, head_dim=head_dim, n_ff_expert=n_ff_expert, **experts, biased=QKV,
        matrices=gated_ffn(n_embd, n_ff_expert, "_shexp"), norms=("attn_norm", "post_attention_norm"),
        biases={"exp_probs_b": experts["n_expert"]}, dense=gated_ffn(n_embd, n_ff), n_dense=n_dense,
        metadata={
            "rope.dimension_count": head_dim // 2, "expert_shared_count": 1, "leading_dense_block_count": n_dense,
            "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.0,
            "nextn_predict_layers": 0,
        },
    )  # fmt: skip


def gemma3(*sizes: Any, head_dim: int, window: int) -> ModelShape:
    """Norms on both sides of attention and FFN, five layers with a window to one without, tied embeddings."""
    return shape(
        "gemma3", *sizes, 1e6, head_dim=head_dim, vectors={"attn_q_norm": head_dim, "attn_k_norm": head_dim}, tied=True,
        norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        metadata={"attention.sliding_window": window, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    )  # fmt: skip


def llama3_long(shape: ModelShape) -> ModelShape:
    """Llama 3.1 and later: a long context by factors of its RoPE."""
    return replace(shape, factors={"rope_freqs": shape.n_embd // shape.n_head // 2})


# The figures of these are those of config.json in the repositories of the same name on huggingface.co: Qwen/Qwen3-32B,
# Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b and -120b, zai-org/GLM-4.5-Air, google/gemma-3-27b-it (text_config, and the
# vocabulary of its GGUFs, which leave out 64 tokens for images), meta-llama/Llama-3.3-70B-Instruct.
TODAY: dict[str, ModelShape] = {
    "qwen3-32b": qwen3(64, 5120, 25600, 64, 8, 151936, 40960, 1e6),
    "qwen3-30b-a3b": qwen3(
        48, 2048, 6144, 32, 4, 151936, 40960, 1e6, n_expert=128, n_expert_used=8, n_ff_expert=768
    ),
    "gpt-oss-20b": gpt_oss(
        24, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, n_expert=32, n_expert_used=4, window=128
    ),
    "gpt-oss-120b": gpt_oss(
        36, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, n_expert=128, n_expert_used=4, window=128
    ),
    "glm-4.5-air": glm4moe(
        46, 4096, 10944, 96, 8, 151552, 131072, 1e6, head_dim=128, n_expert=128, n_expert_used=8, n_ff_expert=1408
    ),
    "gemma-3-27b": gemma3(62, 5376, 21504, 32, 16, 262144, 131072, head_dim=128, window=1024),
    "llama-3.3-70b": llama3_long(llama(80, 8192, 28672, 64, 8, 128256, 131072, rope_base=500000.0)),
}  # fmt: skip

KNOWN: dict[str, ModelShape] = {
    "llama3-8b": llama(32, 4096, 14336, 32, 8, 128256, 8192, rope_base=500000.0),
    "llama2-13b": llama(40, 5120, 13824, 40, 40, 32000),
    "llama2-70b": llama(80, 8192, 28672, 64, 8, 32000),
    "mixtral-8x7b": llama(32, 4096, 14336, 32, 8, 32000, 32768, n_expert=8, rope_base=1e6),
    "mixtral-8x22b": llama(56, 6144, 16384, 48, 8, 32768, 65536, n_expert=8, rope_base=1e6),
    "qwen1.5-14b": qwen2(40, 5120, 13696, 40, 40, 152064, 32768, 1e6),
    "qwq-32b": qwen2(64, 5120, 27648, 40, 8, 152064, 32768, 1e6),
    "qwen2-57b-a14b": qwen2moe(
        28, 3584, 18944, 28, 4, 151936, 32768, 1e6,
        n_expert=64, n_expert_used=8, n_ff_expert=2560, n_ff_shared=20480,
    ),
    "phi3.5-moe": phimoe(32, 4096, 6400, 32, 8, 32064, 131072, n_expert=16),
    "minicpm3-4b": minicpm3(),
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "opt-30b": opt(48, 7168, 56),
    "opt-66b": opt(64, 9216, 72),
    "llama-1b": llama(16, 2048, 8192, 32, 8, 32000),
    "moe-1b": llama(16, 1024, 1792, 16, 8, 32000, n_expert=8),
    "moe-2.7b": llama(12, 2048, 4096, 32, 8, 32000, n_expert=8),
    "llama-mini": llama(8, 768, 2048, 12, 4, 8192),
    "moe-mini": llama(8, 512, 1024, 8, 4, 8192, n_expert=8),
    **TODAY,
}  # fmt: skip
"""By the names that --like takes. The 1b, 2.7b and mini ones are nobody's: small ones for machines without a GPU."""
