"""Models built like Llama: RMSNorm, rope, a gated FFN or experts; with them latent attention."""

from __future__ import annotations

from typing import Any

from gguf_factory.parts import Model, Sizes


def llama_like(
    arch: str,
    z: Sizes,
    *,
    tied: bool = False,
    bias: bool = False,
    fused: bool = False,
    qk_norm: bool = False,
    post_norm: bool = False,
) -> Model:
    """RMSNorm, separate q k v, SwiGLU: llama, qwen2, qwen3, gemma2, gemma3."""
    m = Model(arch, z)
    m.rms()
    m.embedding(tied=tied)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        if fused:
            m.fused_attention(blk)
        else:
            m.attention(blk, bias=bias)
        if qk_norm:
            m.norm(f"{blk}.attn_q_norm", z.n_head_dim)
            m.norm(f"{blk}.attn_k_norm", z.n_head_dim)
        m.norm(f"{blk}.ffn_norm")
        m.ffn(blk)
        if post_norm:
            m.norm(f"{blk}.post_attention_norm")
            m.norm(f"{blk}.post_ffw_norm")
    return m


def gemma(arch: str, z: Sizes, **options: Any) -> Model:
    m = llama_like(arch, z, tied=True, post_norm=True, **options)
    m.metadata[f"{arch}.attention.key_length"] = z.n_head_dim
    m.metadata[f"{arch}.attention.value_length"] = z.n_head_dim
    m.metadata[f"{arch}.attention.sliding_window"] = 64
    return m


def llama_moe(arch: str, z: Sizes, *, qk_norm: bool = False, shared: int = 0) -> Model:
    """Mixtral (as arch llama), qwen3moe, granitemoe: routed experts instead of the FFN."""
    m = Model(arch, z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.attention(blk)
        if qk_norm:
            m.norm(f"{blk}.attn_q_norm", z.n_head_dim)
            m.norm(f"{blk}.attn_k_norm", z.n_head_dim)
        m.norm(f"{blk}.ffn_norm")
        m.experts(blk)
        if shared:
            m.ffn(blk, "_shexp", shared)
            m.set(expert_shared_feed_forward_length=shared)
    if qk_norm:
        m.set(expert_feed_forward_length=z.n_ff)
    return m


def granitemoe(z: Sizes) -> Model:
    m = llama_moe("granitemoe", z, shared=256)
    m.set(logit_scale=4.0)
    return m


def qwen2moe(z: Sizes) -> Model:
    m = Model("qwen2moe", z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.attention(blk, bias=True)
        m.norm(f"{blk}.ffn_norm")
        m.experts(blk, n_ff=256)
        m.tensors.append((f"{blk}.ffn_gate_inp_shexp.weight", (z.n_embd,), "norm"))
        m.ffn(blk, "_shexp", 512)
    m.set(expert_feed_forward_length=256, expert_shared_feed_forward_length=512)
    return m


def phi3(z: Sizes) -> Model:
    m = Model("phi3", z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.fused_attention(blk)
        m.norm(f"{blk}.ffn_norm")
        m.matrix(f"{blk}.ffn_up", z.n_embd, 2 * z.n_ff)  # gate and up in one
        m.matrix(f"{blk}.ffn_down", z.n_ff, z.n_embd)
    m.set(**{"rope.dimension_count": z.n_head_dim})
    return m


def glm4(z: Sizes) -> Model:
    m = Model("glm4", z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.attention(blk, bias=True)
        m.norm(f"{blk}.post_attention_norm")
        m.norm(f"{blk}.ffn_norm")
        m.matrix(f"{blk}.ffn_up", z.n_embd, 2 * z.n_ff)
        m.matrix(f"{blk}.ffn_down", z.n_ff, z.n_embd)
        m.norm(f"{blk}.post_ffw_norm")
    m.set(**{"rope.dimension_count": z.n_head_dim // 2})
    return m


def minicpm3(z: Sizes) -> Model:
    """Multi-head latent attention in its unabsorbed form: attn_kv_b stays one 2-D matrix."""
    rank, nope, rope, v = 256, 64, 32, 64
    m = Model("minicpm3", z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.norm(f"{blk}.attn_q_a_norm", rank)
        m.norm(f"{blk}.attn_kv_a_norm", rank)
        m.matrix(f"{blk}.attn_q_a", z.n_embd, rank)
        m.matrix(f"{blk}.attn_q_b", rank, z.n_head * (nope + rope))
        m.matrix(f"{blk}.attn_kv_a_mqa", z.n_embd, rank + rope)
        m.matrix(f"{blk}.attn_kv_b", rank, z.n_head * (nope + v))
        m.matrix(f"{blk}.attn_output", z.n_head * v, z.n_embd)
        m.norm(f"{blk}.ffn_norm")
        m.ffn(blk)
    m.set(
        **{
            "attention.head_count_kv": z.n_head,
            "attention.q_lora_rank": rank,
            "attention.kv_lora_rank": rank,
            "attention.key_length": nope + rope,
            "attention.value_length": v,
            "rope.dimension_count": rope,
        }
    )
    return m


def deepseek2(z: Sizes, *, fused: bool = False) -> Model:
    """Absorbed MLA: attn_k_b and attn_v_b are 3-D, one matrix a head; the first layer is dense."""
    rank, nope, rope, v = 256, 64, 32, 64
    m = Model("deepseek2", z)
    m.rms()
    m.embedding()
    for i, blk in enumerate(m.blocks()):
        m.norm(f"{blk}.attn_norm")
        m.norm(f"{blk}.attn_q_a_norm", rank)
        m.norm(f"{blk}.attn_kv_a_norm", rank)
        m.matrix(f"{blk}.attn_q_a", z.n_embd, rank)
        m.matrix(f"{blk}.attn_q_b", rank, z.n_head * (nope + rope))
        m.matrix(f"{blk}.attn_kv_a_mqa", z.n_embd, rank + rope)
        m.matrix(f"{blk}.attn_k_b", nope, rank, z.n_head)
        m.matrix(f"{blk}.attn_v_b", rank, v, z.n_head)
        m.matrix(f"{blk}.attn_output", z.n_head * v, z.n_embd)
        m.norm(f"{blk}.ffn_norm")
        if i == 0:
            m.ffn(blk)
        else:
            m.experts(blk, n_ff=256, fused=fused)
            m.ffn(blk, "_shexp", 256)
    m.set(
        expert_feed_forward_length=256,
        expert_shared_count=1,
        leading_dense_block_count=1,
        expert_count=z.n_expert,
        expert_used_count=z.n_expert_used,
        **{
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": rank,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": v,
            "rope.dimension_count": rope,
        },
    )
    return m
