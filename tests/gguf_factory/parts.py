"""The parts tiny models are put together from: hyperparameters, and name, shape and kind of every tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
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

    def experts(self, blk: str, *, n_ff: int | None = None, bias: bool = False, fused: bool = False) -> None:
        """Router and routed experts; fused: gate and up in one tensor."""
        z = self.sizes
        n_ff, e = n_ff or z.n_ff, z.n_expert
        self.matrix(f"{blk}.ffn_gate_inp", z.n_embd, e, bias=bias)
        if fused:
            self.matrix(f"{blk}.ffn_gate_up_exps", z.n_embd, 2 * n_ff, e)
        else:
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
