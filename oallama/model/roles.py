"""A tensor's layer and role from its name, and whether the graph multiplies by it.

Names follow llama.cpp's llama-arch.cpp: `blk.<layer>.<role>.weight`, with `.bias` and `.scale` beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from oallama.core.types import FIRST_ROLES

_BLOCK = re.compile(r"(?:(enc|dec)\.)?blk\.(\d{1,9})\.(.+)")
_SUFFIXES = ("weight", "bias", "scale", "input_scale")


@dataclass(frozen=True, slots=True)
class TensorRole:
    """`layer` is None outside blocks; `suffix` is weight, bias, scale, input_scale, or empty."""

    layer: int | None
    role: str
    suffix: str

    @property
    def side(self) -> str:
        """enc or dec for the blocks of an encoder-decoder, else empty."""
        side, _, rest = self.role.partition(".")
        return side if rest and side in ("enc", "dec") and self.layer is not None else ""


def tensor_role(name: str) -> TensorRole:
    """Split a tensor name; the blocks of an encoder-decoder keep `enc.` or `dec.` before their role."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in _SUFFIXES or not stem:
        stem, suffix = name, ""
    match = _BLOCK.fullmatch(stem)
    if not match:
        return TensorRole(None, stem, suffix)
    side, layer, role = match.groups()
    return TensorRole(int(layer), f"{side}.{role}" if side else role, suffix)


LAYER_ROLES = (
    # before attention, in models that have these; first in a block that predicts further tokens
    "nextn.eh_proj",
    "ple_value", "ple_key", "hc_attn_down", "hc_attn_up", "hc_attn_fn",
    "altup_router", "altup_predict_coef", "laurel_l", "laurel_r",
    # RWKV time mixing
    "time_mix_w1", "time_mix_w2", "time_mix_receptance", "time_mix_key", "time_mix_value", "time_mix_gate",
    "time_mix_decay_w1", "time_mix_decay_w2", "time_mix_a1", "time_mix_a2", "time_mix_v1", "time_mix_v2",
    "time_mix_g1", "time_mix_g2", "time_mix_output",
    # keys of compressed and indexed (sparse) attention
    "attn_compressor_kv", "attn_compressor_gate",
    "indexer.attn_k", "indexer.k_proj", "indexer_compressor_kv", "indexer_compressor_gate",
    # attention; absorbed latent attention runs q_a q_b k_b kv_a_mqa v_b, the plain one q_a q_b kv_a_mqa kv_b
    "attn_qkv", "attn_q_a", "attn_q_b", "attn_q", "attn_k_b", "attn_kv", "attn_kv_a_mqa", "attn_kv_b",
    "attn_v", "attn_k", "indexer.attn_q_b", "indexer.q_proj", "indexer.proj", "attn_v_b",
    # state spaces, linear attention, short convolutions; some beside attention in the same layer
    "ssm_in", "ssm_x", "ssm_dt", "ssm_f_a", "ssm_f_b", "ssm_ba", "ssm_alpha", "ssm_beta",
    "attn_gate", "ssm_g_a", "ssm_g_b", "ssm_g",
    "shortconv.in_proj", "shortconv.out_proj", "attn_output_a", "attn_output_b", "attn_output", "ssm_out",
    "hc_attn_inject", "hc_ffn_down", "hc_ffn_up", "hc_ffn_fn",
    # feed-forward: routed experts (the graph expands them first), the dense one, shared experts
    "ffn_gate_inp", "ffn_latent_down", "ffn_routed_down",
    "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
    "ffn_gate_chexps", "ffn_up_chexps", "ffn_down_chexps", "ffn_latent_up", "ffn_routed_up",
    "ffn_gate", "ffn_up", "ffn_down",
    "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp_shexp",
    "channel_mix_receptance", "channel_mix_key", "channel_mix_value",
    "hc_ffn_inject", "altup_correct_coef", "inp_gate", "proj",
)  # fmt: skip
"""Roles of weights inside blocks that a mul-mat reads, in the order llama.cpp b11549 runs them in one layer."""

_SIDE_ROLES = (
    "enc.attn_q", "enc.attn_k", "enc.attn_v", "enc.attn_o", "enc.ffn_gate", "enc.ffn_up", "enc.ffn_down",
    "dec.attn_q", "dec.attn_v", "dec.attn_k", "dec.attn_o",
    "dec.cross_attn_q", "dec.cross_attn_k", "dec.cross_attn_v", "dec.cross_attn_o",
    "dec.ffn_gate", "dec.ffn_up", "dec.ffn_down",
)  # fmt: skip
"""Roles as in LAYER_ROLES, for an encoder-decoder: only attention with a growing cache takes v before k."""

LAST_ROLES = ("altup_unembd_proj", "output_hc_down", "output_hc_up", "output_hc_fn", "output")
"""Roles outside blocks that a mul-mat reads after the last one; FIRST_ROLES before the first."""

LAYER_ORDER = {role: position for position, role in enumerate(LAYER_ROLES + _SIDE_ROLES)}

MUL_MAT_ROLES = frozenset(LAYER_ORDER) | frozenset(FIRST_ROLES) | frozenset(LAST_ROLES)
MUL_MAT_ID_ROLES = frozenset(role for role in LAYER_ROLES if role.endswith(("_exps", "_chexps")))

INTEGER_ROLES = frozenset({"d2t", "ffn_gate_tid2eid", "masked_embd_ordering"})
"""Look-up tables that hold indices."""

F32_ROLES = frozenset(
    {"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd", "attn_sinks", "exp_probs_b",
     "exp_probs_b_vl", "layer_output_scale", "ssm_a", "ssm_d", "ssm_conv1d", "shortconv.conv", "ffn.act"}
)  # fmt: skip
"""Roles, besides norms, biases and scales, of operations that ggml's CPU backend has in single precision only."""


def is_f32_only(role: TensorRole) -> bool:
    """True for tensors of element-wise operations: with another type ggml aborts while computing."""
    return role.suffix in ("bias", "scale", "input_scale") or "norm" in role.role or role.role in F32_ROLES
