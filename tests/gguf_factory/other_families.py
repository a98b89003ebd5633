"""Models built otherwise: LayerNorm and biases, parallel FFN, sinks, convolutions, state spaces."""

from __future__ import annotations

from dataclasses import replace

from gguf_factory.parts import Model, Sizes


def gpt2_like(arch: str, z: Sizes, *, tied: bool = True, positions: bool = False, embd_norm: bool = False) -> Model:
    """LayerNorm with biases, fused qkv, plain FFN, as many KV heads as heads: gpt2, bloom, gptneox."""
    m = Model(arch, replace(z, n_head_kv=z.n_head))
    m.layer_norm()
    m.embedding(norm_bias=True, tied=tied)
    if positions:
        m.matrix("position_embd", z.n_embd, z.n_ctx)
    if embd_norm:
        m.norm("token_embd_norm", bias=True)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm", bias=True)
        m.fused_attention(blk, bias=True)
        m.norm(f"{blk}.ffn_norm", bias=True)
        m.plain_ffn(blk)
    return m


def gptneox(z: Sizes) -> Model:
    m = gpt2_like("gptneox", z, tied=False)
    m.set(use_parallel_residual=True, **{"rope.dimension_count": z.n_head_dim // 4})
    return m


def falcon(z: Sizes) -> Model:
    m = Model("falcon", z)
    m.layer_norm()
    m.embedding(norm_bias=True, tied=True)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm", bias=True)
        m.fused_attention(blk)
        m.matrix(f"{blk}.ffn_up", z.n_embd, z.n_ff)
        m.matrix(f"{blk}.ffn_down", z.n_ff, z.n_embd)
    return m


def starcoder2(z: Sizes) -> Model:
    m = Model("starcoder2", z)
    m.layer_norm()
    m.embedding(norm_bias=True, tied=True)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm", bias=True)
        m.attention(blk, bias=True, out_bias=True)
        m.norm(f"{blk}.ffn_norm", bias=True)
        m.plain_ffn(blk)
    return m


def phi2(z: Sizes) -> Model:
    m = Model("phi2", z)
    m.layer_norm()
    m.embedding(norm_bias=True, output_bias=True)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm", bias=True)
        m.attention(blk, bias=True, out_bias=True)
        m.plain_ffn(blk)
    m.set(**{"rope.dimension_count": z.n_head_dim // 2})
    return m


def command_r(z: Sizes) -> Model:
    m = Model("command-r", z)
    m.layer_norm()
    m.embedding(tied=True)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.attention(blk)
        m.ffn(blk)
    m.set(logit_scale=0.0625)
    return m


def olmo2(z: Sizes) -> Model:
    m = Model("olmo2", z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.attention(blk)
        m.norm(f"{blk}.attn_q_norm", z.n_embd)
        m.norm(f"{blk}.attn_k_norm", z.n_embd_kv)
        m.norm(f"{blk}.post_attention_norm")
        m.ffn(blk)
        m.norm(f"{blk}.post_ffw_norm")
    return m


def gpt_oss(z: Sizes) -> Model:
    """Routed experts with 2-D biases, attention sinks."""
    m = Model("gpt-oss", z)
    m.rms()
    m.embedding()
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.attention(blk, bias=True, out_bias=True)
        m.norm(f"{blk}.attn_sinks", z.n_head)
        m.norm(f"{blk}.post_attention_norm")
        m.experts(blk, bias=True)
    m.set(expert_feed_forward_length=z.n_ff, **{"attention.sliding_window": 64})
    return m


def lfm2(z: Sizes) -> Model:
    """Short convolutions in even layers, attention in odd ones."""
    m = Model("lfm2", z)
    m.rms()
    m.matrix("token_embd", z.n_embd, z.n_vocab)
    m.norm("token_embd_norm")
    for i, blk in enumerate(m.blocks()):
        m.norm(f"{blk}.attn_norm")
        if i % 2:
            m.attention(blk)
            m.norm(f"{blk}.attn_q_norm", z.n_head_dim)
            m.norm(f"{blk}.attn_k_norm", z.n_head_dim)
        else:
            m.tensors.append((f"{blk}.shortconv.conv.weight", (3, z.n_embd), "state"))
            m.matrix(f"{blk}.shortconv.in_proj", z.n_embd, 3 * z.n_embd)
            m.matrix(f"{blk}.shortconv.out_proj", z.n_embd, z.n_embd)
        m.norm(f"{blk}.ffn_norm")
        m.ffn(blk)
    heads = [z.n_head_kv if i % 2 else 0 for i in range(z.n_layer)]
    m.set(**{"attention.head_count_kv": heads, "shortconv.l_cache": 3})
    return m


def mamba2(z: Sizes) -> Model:
    """No attention at all."""
    inner, state, groups, heads = 512, 64, 1, 8
    conv = inner + 2 * groups * state
    m = Model("mamba2", z)
    m.rms()
    m.embedding(tied=True)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
        m.matrix(f"{blk}.ssm_in", z.n_embd, inner + conv + heads)
        m.tensors.append((f"{blk}.ssm_conv1d.weight", (4, conv), "state"))
        m.tensors.append((f"{blk}.ssm_conv1d.bias", (conv,), "bias"))
        m.tensors.append((f"{blk}.ssm_dt.bias", (heads,), "bias"))
        m.tensors.append((f"{blk}.ssm_a", (1, heads), "state"))
        m.tensors.append((f"{blk}.ssm_d", (1, heads), "state"))
        m.tensors.append((f"{blk}.ssm_norm.weight", (inner // groups, groups), "norm"))
        m.matrix(f"{blk}.ssm_out", inner, z.n_embd)
    m.set(
        feed_forward_length=0,
        **{
            "attention.head_count": 0,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.time_step_rank": heads,
            "ssm.group_count": groups,
        },
    )
    del m.metadata["mamba2.attention.head_count_kv"]
    return m


def t5(z: Sizes) -> Model:
    """An encoder and a decoder, the decoder one layer lower."""
    m = Model("t5", replace(z, n_head_kv=z.n_head))
    m.rms()
    m.embedding()
    m.tensors = [tensor for tensor in m.tensors if tensor[0] != "output_norm.weight"]
    for side, n_layer in (("enc", z.n_layer), ("dec", z.n_layer - 1)):
        m.norm(f"{side}.output_norm")
        for i in range(n_layer):
            blk = f"{side}.blk.{i}"
            for attention in ("attn",) if side == "enc" else ("attn", "cross_attn"):
                m.norm(f"{blk}.{attention}_norm")
                for role in "qkvo":
                    m.matrix(f"{blk}.{attention}_{role}", z.n_embd, z.n_embd)
            m.tensors.append((f"{blk}.attn_rel_b.weight", (z.n_head, 32), "state"))
            m.norm(f"{blk}.ffn_norm")
            for role, shape in {
                "gate": (z.n_embd, z.n_ff),
                "up": (z.n_embd, z.n_ff),
                "down": (z.n_ff, z.n_embd),
            }.items():
                m.matrix(f"{blk}.ffn_{role}", *shape)
    m.set(
        decoder_block_count=z.n_layer - 1,
        decoder_start_token_id=0,
        **{
            "attention.key_length": z.n_head_dim,
            "attention.value_length": z.n_head_dim,
            "attention.relative_buckets_count": 32,
        },
    )
    return m
