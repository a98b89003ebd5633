"""What a tiny model of each architecture consists of: hyperparameters, and name, shape and kind of every tensor.

Widths are multiples of 256 wherever llama.cpp allows it, so that every block type fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["matrix", "norm", "bias", "state"]  # state: recurrent parameters that must stay F32


@dataclass(frozen=True)
class Sizes:
    """The extents a caller of write_gguf may change."""

    n_layer: int = 2
    n_embd: int = 256
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    n_vocab: int = 320
    n_ctx: int = 256
    n_expert: int = 8
    n_expert_used: int = 2

    @property
    def n_head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_embd_kv(self) -> int:
        return self.n_head_dim * self.n_head_kv


@dataclass
class Model:
    """The parts of one model, in the order they are written."""

    arch: str
    sizes: Sizes
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[str, tuple[int, ...], Kind]] = field(default_factory=list)

    def __post_init__(self) -> None:
        z = self.sizes
        self.set(
            context_length=z.n_ctx,
            embedding_length=z.n_embd,
            block_count=z.n_layer,
            feed_forward_length=z.n_ff,
            vocab_size=z.n_vocab,
            **{"attention.head_count": z.n_head, "attention.head_count_kv": z.n_head_kv},
        )

    def set(self, **values: Any) -> None:
        """Set hyperparameters, named without the architecture's prefix."""
        self.metadata.update({f"{self.arch}.{key}": value for key, value in values.items()})

    def norm(self, name: str, n: int | None = None, *, bias: bool = False) -> None:
        shape = (n or self.sizes.n_embd,)
        self.tensors.append((f"{name}.weight", shape, "norm"))
        if bias:
            self.tensors.append((f"{name}.bias", shape, "bias"))

    def matrix(self, name: str, *shape: int, bias: bool = False) -> None:
        self.tensors.append((f"{name}.weight", shape, "matrix"))
        if bias:
            self.tensors.append((f"{name}.bias", shape[1:], "bias"))

    def embedding(self, *, norm_bias: bool = False, tied: bool = False, output_bias: bool = False) -> None:
        z = self.sizes
        self.matrix("token_embd", z.n_embd, z.n_vocab)
        self.norm("output_norm", bias=norm_bias)
        if not tied:
            self.matrix("output", z.n_embd, z.n_vocab, bias=output_bias)

    def attention(self, blk: str, *, bias: bool = False, out_bias: bool = False) -> None:
        """Separate q, k, v and the output projection."""
        z = self.sizes
        self.matrix(f"{blk}.attn_q", z.n_embd, z.n_embd, bias=bias)
        self.matrix(f"{blk}.attn_k", z.n_embd, z.n_embd_kv, bias=bias)
        self.matrix(f"{blk}.attn_v", z.n_embd, z.n_embd_kv, bias=bias)
        self.matrix(f"{blk}.attn_output", z.n_embd, z.n_embd, bias=out_bias)

    def fused_attention(self, blk: str, *, bias: bool = False) -> None:
        z = self.sizes
        self.matrix(f"{blk}.attn_qkv", z.n_embd, z.n_embd + 2 * z.n_embd_kv, bias=bias)
        self.matrix(f"{blk}.attn_output", z.n_embd, z.n_embd, bias=bias)

    def ffn(self, blk: str, suffix: str = "", n_ff: int | None = None) -> None:
        """Gate, up and down."""
        z = self.sizes
        n_ff = n_ff or z.n_ff
        self.matrix(f"{blk}.ffn_gate{suffix}", z.n_embd, n_ff)
        self.matrix(f"{blk}.ffn_up{suffix}", z.n_embd, n_ff)
        self.matrix(f"{blk}.ffn_down{suffix}", n_ff, z.n_embd)

    def plain_ffn(self, blk: str) -> None:
        """Up and down with biases, no gate (GPT-2's)."""
        z = self.sizes
        self.matrix(f"{blk}.ffn_up", z.n_embd, z.n_ff, bias=True)
        self.matrix(f"{blk}.ffn_down", z.n_ff, z.n_embd, bias=True)

    def experts(self, blk: str, *, n_ff: int | None = None, bias: bool = False) -> None:
        """Router and routed experts."""
        z = self.sizes
        n_ff, e = n_ff or z.n_ff, z.n_expert
        self.matrix(f"{blk}.ffn_gate_inp", z.n_embd, e, bias=bias)
        self.matrix(f"{blk}.ffn_gate_exps", z.n_embd, n_ff, e, bias=bias)
        self.matrix(f"{blk}.ffn_up_exps", z.n_embd, n_ff, e, bias=bias)
        self.matrix(f"{blk}.ffn_down_exps", n_ff, z.n_embd, e, bias=bias)
        self.set(expert_count=e, expert_used_count=z.n_expert_used)

    def blocks(self) -> list[str]:
        return [f"blk.{i}" for i in range(self.sizes.n_layer)]

    def rms(self) -> None:
        self.metadata[f"{self.arch}.attention.layer_norm_rms_epsilon"] = 1e-5

    def layer_norm(self) -> None:
        self.metadata[f"{self.arch}.attention.layer_norm_epsilon"] = 1e-5


def llama_like(
    arch: str, z: Sizes, *, tied: bool = False, bias: bool = False, qk_norm: bool = False, post_norm: bool = False
) -> Model:
    """RMSNorm, separate q k v, SwiGLU: llama, qwen2, qwen3, gemma2, gemma3."""
    m = Model(arch, z)
    m.rms()
    m.embedding(tied=tied)
    for blk in m.blocks():
        m.norm(f"{blk}.attn_norm")
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


def deepseek2(z: Sizes) -> Model:
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
            m.experts(blk, n_ff=256)
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


ARCHITECTURES: dict[str, Callable[[Sizes], Model]] = {
    "llama": lambda z: llama_like("llama", z),
    "llama-tied": lambda z: llama_like("llama", z, tied=True),
    "llama-moe": lambda z: llama_moe("llama", z),
    "qwen2": lambda z: llama_like("qwen2", z, bias=True),
    "qwen3": lambda z: llama_like("qwen3", z, qk_norm=True),
    "qwen3moe": lambda z: llama_moe("qwen3moe", z, qk_norm=True),
    "qwen2moe": qwen2moe,
    "gemma2": lambda z: gemma("gemma2", z),
    "gemma3": lambda z: gemma("gemma3", z, qk_norm=True),
    "phi3": phi3,
    "minicpm3": minicpm3,
    "gpt2": lambda z: gpt2_like("gpt2", z, positions=True),
    "deepseek2": deepseek2,
    "granitemoe": granitemoe,
    "glm4": glm4,
    "gptneox": gptneox,
    "bloom": lambda z: gpt2_like("bloom", z, embd_norm=True),
    "falcon": falcon,
    "starcoder2": starcoder2,
    "phi2": phi2,
    "command-r": command_r,
    "olmo2": olmo2,
    "gpt-oss": gpt_oss,
    "lfm2": lfm2,
    "mamba2": mamba2,
}
