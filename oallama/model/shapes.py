"""Shapes of popular models by name: architecture, sizes and matrices as in their GGUFs, without weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oallama.core.ggml_types import GGML_TYPES_BY_NAME

Ne = tuple[int, ...]  # ne[0] first, as ggml counts


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model with random weights. Per layer: matrices by role, vectors of ones, biases of zeros.

    dense: the FFN of the first n_dense layers, if only later layers have experts. mtp: further matrices and vectors of
    the last block, if it predicts further tokens. Outside layers: `factors` of ones, `last_biases` of zeros after the
    last layer; tied: the embedding is the output too. metadata: keys without the architecture's prefix, besides the
    sizes that every model has.
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
    mtp: dict[str, Ne] = field(default_factory=dict)
    tied: bool = False

    def with_layers(self, n_layer: int | None) -> ModelShape:
        """Return this shape with another number of layers."""
        return self if n_layer is None else replace(self, n_layer=n_layer)


def attention_and_ffn(
    n_embd: int, n_ff: int, n_head: int, n_head_kv: int, head_dim: int, n_expert: int = 0, n_ff_expert: int = 0
) -> dict[str, Ne]:
    """Return the matrices of a layer; its heads need not add up to its width. n_expert: experts of its FFN, 0:
    dense."""
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
EMPTY: dict[str, Any] = {}


def shape(
    arch: str, *sizes: Any, head_dim: int = 0, n_expert: int = 0, n_expert_used: int = 0, n_ff_expert: int = 0,
    biased: Iterable[str] = (), norms: Iterable[str] = ("attn_norm", "ffn_norm"), matrices: dict[str, Ne] = EMPTY,
    vectors: dict[str, int] = EMPTY, metadata: dict[str, Any] = EMPTY, **more: Any,
) -> ModelShape:  # fmt: skip
    """RMSNorm, attention and a gated FFN or experts, as most models have them.

    sizes: n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx and, if the file states it, RoPE's base. head_dim,
    n_ff_expert: if the file states the size of heads, and of experts besides a dense FFN's. biased: roles with biases;
    norms: of the model's width. matrices, vectors, metadata: additional ones; more: other fields.
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


def qwen2(*sizes: Any) -> ModelShape:
    """Llama's matrices, and biases of q, k and v."""
    return shape("qwen2", *sizes, biased=QKV)


def qwen3(*sizes: Any, head_dim: int = 128, tied: bool = False, **experts: Any) -> ModelShape:
    """Norms of each head's q and k; with experts Qwen3-MoE, all of whose layers have them (n_ff is unused then)."""
    norms = {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
    arch = "qwen3moe" if experts else "qwen3"
    return shape(arch, *sizes, head_dim=head_dim, vectors=norms, tied=tied, **experts)


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
    """Routed experts and a shared expert, except in the first layers; without the MTP layer. RoPE rotates half of each
    head."""
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


def phi3(
    n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_vocab: int, n_ctx: int, base: float
) -> ModelShape:
    """One matrix for q, k and v, and one for gate and up."""
    head_dim = n_embd // n_head
    matrices: dict[str, Ne] = {
        "attn_qkv": (n_embd, (n_head + 2 * n_head_kv) * head_dim),
        "attn_output": (n_embd, n_embd),
        "ffn_up": (n_embd, 2 * n_ff),
        "ffn_down": (n_ff, n_embd),
    }
    return ModelShape(
        "phi3", n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_ctx,
        matrices=matrices, vectors=dict.fromkeys(("attn_norm", "ffn_norm"), n_embd),
        metadata={"rope.dimension_count": head_dim, "rope.freq_base": base},
    )  # fmt: skip


POPULAR: dict[str, ModelShape] = {
    "llama-3.2-1b": llama3_long(llama(16, 2048, 8192, 32, 8, 128256, 131072, rope_base=500000.0, tied=True)),
    "llama-3.2-3b": llama3_long(llama(28, 3072, 8192, 24, 8, 128256, 131072, rope_base=500000.0, tied=True)),
    "llama-3.1-8b": llama3_long(llama(32, 4096, 14336, 32, 8, 128256, 131072, rope_base=500000.0)),
    "llama-3.3-70b": llama3_long(llama(80, 8192, 28672, 64, 8, 128256, 131072, rope_base=500000.0)),
    "qwen2.5-7b": qwen2(28, 3584, 18944, 28, 4, 152064, 32768, 1e6),
    "qwen2.5-14b": qwen2(48, 5120, 13824, 40, 8, 152064, 32768, 1e6),
    "qwen2.5-32b": qwen2(64, 5120, 27648, 40, 8, 152064, 32768, 1e6),
    "qwen3-4b": qwen3(36, 2560, 9728, 32, 8, 151936, 40960, 1e6, tied=True),
    "qwen3-8b": qwen3(36, 4096, 12288, 32, 8, 151936, 40960, 1e6),
    "qwen3-14b": qwen3(40, 5120, 17408, 40, 8, 151936, 40960, 1e6),
    "qwen3-32b": qwen3(64, 5120, 25600, 64, 8, 151936, 40960, 1e6),
    "qwen3-30b-a3b": qwen3(
        48, 2048, 6144, 32, 4, 151936, 40960, 1e6, n_expert=128, n_expert_used=8, n_ff_expert=768
    ),
    "qwen3-235b-a22b": qwen3(
        94, 4096, 12288, 64, 4, 151936, 40960, 1e6, n_expert=128, n_expert_used=8, n_ff_expert=1536
    ),
    "gemma-3-4b": gemma3(34, 2560, 10240, 8, 4, 262144, 131072, head_dim=256, window=1024),
    "gemma-3-12b": gemma3(48, 3840, 15360, 16, 8, 262144, 131072, head_dim=256, window=1024),
    "gemma-3-27b": gemma3(62, 5376, 21504, 32, 16, 262144, 131072, head_dim=128, window=1024),
    "phi-4": phi3(40, 5120, 17920, 40, 10, 100352, 16384, 250000.0),
    "mistral-7b": llama(32, 4096, 14336, 32, 8, 32768, 32768, rope_base=1e6),
    "mistral-nemo": shape("llama", 40, 5120, 14336, 32, 8, 131072, 128000, 1e6, head_dim=128),
    "mixtral-8x7b": llama(32, 4096, 14336, 32, 8, 32000, 32768, n_expert=8, rope_base=1e6),
    "gpt-oss-20b": gpt_oss(
        24, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, n_expert=32, n_expert_used=4, window=128
    ),
    "gpt-oss-120b": gpt_oss(
        36, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, n_expert=128, n_expert_used=4, window=128
    ),
    "glm-4.5-air": glm4moe(
        46, 4096, 10944, 96, 8, 151552, 131072, 1e6, head_dim=128, n_expert=128, n_expert_used=8, n_ff_expert=1408
    ),
}  # fmt: skip
"""Shapes by name. A fine-tuned model has the shape of its base. Sources of the figures:

- litgpt: Lightning-AI/litgpt, litgpt/config.py at 2685705 (June 2026), which has the figures of config.json in the
  repositories of the same name on huggingface.co: Llama-3.2-1B, -3B, Llama-3.1-8B, Llama-3.3-70B-Instruct,
  Qwen2.5-7B, -14B, -32B (Coder alike), Qwen3-4B, -8B, -14B, -32B, -30B-A3B, -235B-A22B, gemma-3-4b-it, -12b-it,
  -27b-it (text_config, and the vocabulary of its GGUFs, which leave out 64 tokens for images), phi-4,
  Mistral-7B-Instruct-v0.3, Mixtral-8x7B-Instruct-v0.1
- tied embeddings: tie_word_embeddings of config.json: Llama-3.2-1B (kevinstephano/thunder_model_blocks,
  hf_llama/llama_config.py), Llama-3.2-3B (LocalResearchGroup/llm-foundry, llmfoundry/models/llama/config.py),
  Qwen3-4B (huggingface.co/gitglubber/slider_onnx, config.json)
- mistral-nemo: config.json of mistralai/Mistral-Nemo-Base-2407, in kevinstephano/thunder_model_blocks
- gpt-oss-20b, gpt-oss-120b, glm-4.5-air: config.json of openai/gpt-oss-20b and -120b, zai-org/GLM-4.5-Air
"""

_TUNED = re.compile(r"-?(?:instruct|coder|chat|it|gguf|hf)(?=[-:]|$)")


def popular(name: str) -> tuple[str, str] | None:
    """Return (name of a popular model, type of its matrices) for a text, ignoring case and punctuation: `gemma-3-27b`,
    `gemma3:27b`, `google/gemma-3-27b-it-GGUF`, each with or without :TYPE. None for any other text. The default type is
    MXFP4 for gpt-oss, else Q4_0."""
    word = name.lower().rpartition("/")[2]
    head, _, kind = word.rpartition(":")
    kind = re.sub(r"_[SML]$", "", kind.upper())  # Q4_K_M: the type of most of its matrices
    named_type = kind if head and kind in GGML_TYPES_BY_NAME else ""
    key = _plain(head if named_type else word)
    model = next((candidate for candidate in POPULAR if _plain(candidate) == key), None)
    return None if model is None else (model, named_type or ("MXFP4" if model.startswith("gpt-oss") else "Q4_0"))


def _plain(name: str) -> str:
    return re.sub(r"[-_: ]", "", _TUNED.sub("", name))
