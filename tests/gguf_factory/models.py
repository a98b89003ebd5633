"""Tiny random models: what each architecture consists of, and a writer.

Widths are multiples of 256 wherever llama.cpp allows it, so that every block type fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from make_model import random_blocks

from oallama.model.shape_file import ADD, add_byte_bpe

Shape = tuple[int, ...]  # ne[0] first, as ggml counts


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


@dataclass(frozen=True)
class Architecture:
    """layer: tensors of a layer in their order, "+" with a bias. head: those before layers. layer_norm: with a mean,
    unlike Llama's. all_kv: as many KV heads as heads. n_ff_expert, n_ff_shared: width of experts, where it is not n_ff.
    shapes: those that are not as in `shapes_of`. metadata: without the architecture's prefix; None leaves one out."""

    layer: str | Callable[[int], str]
    head: str | Callable[[Sizes], str] = "token_embd output_norm output"
    layer_norm: bool = False
    all_kv: bool = False
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    shapes: Callable[[Sizes], dict[str, Shape]] = lambda z: {}
    metadata: Callable[[Sizes], dict[str, Any]] = lambda z: {}


RANK, NOPE, ROPE, VALUE = 256, 64, 32, 64
"""Latent attention: its rank, places of a head's keys that are not rotated and that are, and of its values."""
INNER, STATE, STEPS = 512, 64, 8
"""Mamba 2: width of its inner part, of its state, and number of time steps."""
CONVOLVED = INNER + 2 * STATE
HEAD_STATE, KEY_HEADS, VALUE_HEADS = 64, 2, 4
"""Gated delta net: width of a head's keys and values, number of either."""


def shapes_of(z: Sizes, n_ff_expert: int, n_ff_shared: int) -> dict[str, Shape]:
    """Shapes by name; what is not here is a norm of the model's width."""
    kv = z.n_head_dim * z.n_head_kv
    shapes: dict[str, Shape] = {
        "token_embd": (z.n_embd, z.n_vocab),
        "output": (z.n_embd, z.n_vocab),
        "position_embd": (z.n_embd, z.n_ctx),
        "attn_q": (z.n_embd, z.n_embd),
        "attn_k": (z.n_embd, kv),
        "attn_v": (z.n_embd, kv),
        "attn_o": (z.n_embd, z.n_embd),
        "attn_output": (z.n_embd, z.n_embd),
        "attn_qkv": (z.n_embd, z.n_embd + 2 * kv),
        "attn_q_norm": (z.n_head_dim,),
        "attn_k_norm": (z.n_head_dim,),
        "attn_sinks": (z.n_head,),
        "attn_rel_b": (z.n_head, 32),
        "attn_q_a_norm": (RANK,),
        "attn_kv_a_norm": (RANK,),
        "attn_q_a": (z.n_embd, RANK),
        "attn_q_b": (RANK, z.n_head * (NOPE + ROPE)),
        "attn_kv_a_mqa": (z.n_embd, RANK + ROPE),
        "attn_kv_b": (RANK, z.n_head * (NOPE + VALUE)),
        "attn_k_b": (NOPE, RANK, z.n_head),
        "attn_v_b": (RANK, VALUE, z.n_head),
        "ffn_gate_inp": (z.n_embd, z.n_expert),
        "ffn_gate_up_exps": (z.n_embd, 2 * n_ff_expert, z.n_expert),
        "shortconv.conv": (3, z.n_embd),
        "shortconv.in_proj": (z.n_embd, 3 * z.n_embd),
        "shortconv.out_proj": (z.n_embd, z.n_embd),
        "ssm_in": (z.n_embd, INNER + CONVOLVED + STEPS),
        "ssm_conv1d": (4, CONVOLVED),
        "ssm_dt.bias": (STEPS,),
        "ssm_a": (1, STEPS),
        "ssm_d": (1, STEPS),
        "ssm_norm": (INNER, 1),
        "ssm_out": (INNER, z.n_embd),
    }
    for suffix, n_ff, *n in (("", z.n_ff), ("_exps", n_ff_expert, z.n_expert), ("_shexp", n_ff_shared)):
        shapes |= dict.fromkeys((f"ffn_gate{suffix}", f"ffn_up{suffix}"), (z.n_embd, n_ff, *n))
        shapes[f"ffn_down{suffix}"] = (n_ff, z.n_embd, *n)
    return shapes


TIED = "token_embd output_norm"
ATTENTION = "attn_q attn_k attn_v attn_output"
BIASED = "attn_q+ attn_k+ attn_v+ attn_output"
HEAD_NORMS = "attn_q_norm attn_k_norm"
LATENT = "attn_norm attn_q_a_norm attn_kv_a_norm attn_q_a attn_q_b attn_kv_a_mqa"
FFN = "ffn_gate ffn_up ffn_down"
EXPERTS = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
SHARED = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
LLAMA = f"attn_norm {ATTENTION} ffn_norm {FFN}"
GEMMA = f"ffn_norm {FFN} post_attention_norm post_ffw_norm"
GPT2 = "attn_norm+ attn_qkv+ attn_output+ ffn_norm+ ffn_up+ ffn_down+"
STATES = {"shortconv.conv", "ssm_conv1d", "ssm_a", "ssm_d", "attn_rel_b"}  # recurrent parameters, which stay F32
VECTORS = {"attn_sinks", "ffn_gate_inp_shexp"}  # made like norms
ADDED = {"attn_output", "ssm_out", "ffn_down"}  # last of a block, whose result is added
BARE = {"ssm_a", "ssm_d", "ssm_dt.bias"}  # names without .weight


def gemma(z: Sizes) -> dict[str, Any]:
    return {**head_width(z), "attention.sliding_window": 64}


def head_width(z: Sizes) -> dict[str, Any]:
    return {"attention.key_length": z.n_head_dim, "attention.value_length": z.n_head_dim}


def rotated(part: int) -> Callable[[Sizes], dict[str, Any]]:
    return lambda z: {"rope.dimension_count": z.n_head_dim // part}


def gate_in_up(z: Sizes) -> dict[str, Shape]:
    return {"ffn_up": (z.n_embd, 2 * z.n_ff)}


def latent_output(z: Sizes) -> dict[str, Shape]:
    return {"attn_output": (z.n_head * VALUE, z.n_embd)}


RANKS = {"attention.q_lora_rank": RANK, "attention.kv_lora_rank": RANK, "rope.dimension_count": ROPE}


def deepseek2(experts: str) -> Architecture:
    """Absorbed latent attention: attn_k_b and attn_v_b have a matrix for each head; the first layer is dense."""
    return Architecture(
        lambda i: f"{LATENT} attn_k_b attn_v_b attn_output ffn_norm {f'{experts} {SHARED}' if i else FFN}",
        n_ff_expert=256,
        n_ff_shared=256,
        shapes=latent_output,
        metadata=lambda z: {
            **RANKS,
            "expert_feed_forward_length": 256,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "attention.head_count_kv": 1,
            "attention.key_length": RANK + ROPE,
            "attention.value_length": RANK,
            "attention.key_length_mla": NOPE + ROPE,
            "attention.value_length_mla": VALUE,
        },
    )


def lfm2(i: int) -> str:
    """Short convolutions in even layers, attention in odd ones."""
    first = f"{ATTENTION} {HEAD_NORMS}" if i % 2 else "shortconv.conv shortconv.in_proj shortconv.out_proj"
    return f"attn_norm {first} ffn_norm {FFN}"


def qwen35(i: int) -> str:
    """Gated delta nets in even layers, gated attention in odd ones, and a MTP layer that drafts."""
    recurrent = "attn_qkv attn_gate ssm_conv1d ssm_dt.bias ssm_a ssm_beta ssm_alpha ssm_norm ssm_out"
    first = f"{ATTENTION} {HEAD_NORMS}" if i % 2 or i == 2 else recurrent
    last = " nextn.eh_proj nextn.enorm nextn.hnorm nextn.shared_head_norm" if i == 2 else ""
    return f"attn_norm {first} post_attention_norm {FFN}{last}"


def delta_net(z: Sizes) -> dict[str, Shape]:
    values, convolved = VALUE_HEADS * HEAD_STATE, (2 * KEY_HEADS + VALUE_HEADS) * HEAD_STATE
    return {
        "attn_q": (z.n_embd, 2 * z.n_embd),
        "attn_qkv": (z.n_embd, convolved),
        "attn_gate": (z.n_embd, values),
        "ssm_conv1d": (4, convolved),
        "ssm_dt.bias": (VALUE_HEADS,),
        "ssm_a": (VALUE_HEADS,),
        "ssm_beta": (z.n_embd, VALUE_HEADS),
        "ssm_alpha": (z.n_embd, VALUE_HEADS),
        "ssm_norm": (HEAD_STATE,),
        "ssm_out": (values, z.n_embd),
        "nextn.eh_proj": (2 * z.n_embd, z.n_embd),
    }


def t5(z: Sizes) -> str:
    """An encoder and a decoder, the decoder one layer lower."""
    names = ["token_embd", "output"]
    for side, n_layer, attentions in (("enc", z.n_layer, ["attn"]), ("dec", z.n_layer - 1, ["attn", "cross_attn"])):
        names.append(f"{side}.output_norm")
        for i in range(n_layer):
            parts = [f"{attention}_{part}" for attention in attentions for part in ("norm", *"qkvo")]
            names += [f"{side}.blk.{i}.{name}" for name in (*parts, "attn_rel_b", "ffn_norm", *FFN.split())]
    return " ".join(names)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(LLAMA),
    "llama-tied": Architecture(LLAMA, TIED),
    "llama-moe": Architecture(f"attn_norm {ATTENTION} ffn_norm {EXPERTS}"),
    "llama-fused": Architecture(f"attn_norm attn_qkv attn_output ffn_norm {FFN}"),
    "qwen2": Architecture(f"attn_norm {BIASED} ffn_norm {FFN}"),
    "qwen3": Architecture(f"attn_norm {ATTENTION} {HEAD_NORMS} ffn_norm {FFN}"),
    "qwen3moe": Architecture(
        f"attn_norm {ATTENTION} {HEAD_NORMS} ffn_norm {EXPERTS}",
        metadata=lambda z: {"expert_feed_forward_length": z.n_ff},
    ),
    "qwen2moe": Architecture(
        f"attn_norm {BIASED} ffn_norm {EXPERTS} ffn_gate_inp_shexp {SHARED}",
        n_ff_expert=256,
        n_ff_shared=512,
        metadata=lambda z: {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512},
    ),
    "gemma2": Architecture(f"attn_norm {ATTENTION} {GEMMA}", TIED, metadata=gemma),
    "gemma3": Architecture(f"attn_norm {ATTENTION} {HEAD_NORMS} {GEMMA}", TIED, metadata=gemma),
    "phi3": Architecture(
        "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down", shapes=gate_in_up, metadata=rotated(1)
    ),
    "minicpm3": Architecture(
        f"{LATENT} attn_kv_b attn_output ffn_norm {FFN}",
        all_kv=True,
        shapes=latent_output,
        metadata=lambda z: {**RANKS, "attention.key_length": NOPE + ROPE, "attention.value_length": VALUE},
    ),
    "gpt2": Architecture(GPT2, "token_embd output_norm+ position_embd", layer_norm=True, all_kv=True),
    "deepseek2": deepseek2(EXPERTS),
    "mistral4": deepseek2(EXPERTS),
    "deepseek2-fused": deepseek2("ffn_gate_inp ffn_gate_up_exps ffn_down_exps"),
    "granitemoe": Architecture(
        f"attn_norm {ATTENTION} ffn_norm {EXPERTS} {SHARED}",
        n_ff_shared=256,
        metadata=lambda z: {"expert_shared_feed_forward_length": 256, "logit_scale": 4.0},
    ),
    "glm4": Architecture(
        f"attn_norm {BIASED} post_attention_norm ffn_norm ffn_up ffn_down post_ffw_norm",
        shapes=gate_in_up,
        metadata=rotated(2),
    ),
    "gptneox": Architecture(
        GPT2,
        "token_embd output_norm+ output",
        layer_norm=True,
        all_kv=True,
        metadata=lambda z: {"use_parallel_residual": True, "rope.dimension_count": z.n_head_dim // 4},
    ),
    "bloom": Architecture(GPT2, "token_embd output_norm+ token_embd_norm+", layer_norm=True, all_kv=True),
    "falcon": Architecture(
        "attn_norm+ attn_qkv attn_output ffn_up ffn_down", "token_embd output_norm+", layer_norm=True
    ),
    "refact": Architecture(LLAMA),
    "starcoder2": Architecture(
        f"attn_norm+ {BIASED}+ ffn_norm+ ffn_up+ ffn_down+", "token_embd output_norm+", layer_norm=True
    ),
    "phi2": Architecture(
        f"attn_norm+ {BIASED}+ ffn_up+ ffn_down+",
        "token_embd output_norm+ output+",
        layer_norm=True,
        metadata=rotated(2),
    ),
    "command-r": Architecture(
        f"attn_norm {ATTENTION} {FFN}", TIED, layer_norm=True, metadata=lambda z: {"logit_scale": 0.0625}
    ),
    "cohere2": Architecture(
        f"attn_norm {ATTENTION} {FFN}",
        TIED,
        layer_norm=True,
        metadata=lambda z: {
            "logit_scale": 0.0625,
            "attention.sliding_window": 64,
            "rope.dimension_count": z.n_head_dim,
        },
    ),
    "granite": Architecture(LLAMA, metadata=lambda z: {"logit_scale": 4.0}),
    "olmo2": Architecture(
        f"{ATTENTION} {HEAD_NORMS} post_attention_norm {FFN} post_ffw_norm",
        shapes=lambda z: {"attn_q_norm": (z.n_embd,), "attn_k_norm": (z.n_head_dim * z.n_head_kv,)},
    ),
    "gpt-oss": Architecture(
        f"attn_norm {BIASED}+ attn_sinks post_attention_norm {EXPERTS.replace(' ', '+ ')}+",
        metadata=lambda z: {"expert_feed_forward_length": z.n_ff, "attention.sliding_window": 64},
    ),
    "lfm2": Architecture(
        lfm2,
        "token_embd token_embd_norm",
        metadata=lambda z: {
            "attention.head_count_kv": [z.n_head_kv if i % 2 else 0 for i in range(z.n_layer)],
            "shortconv.l_cache": 3,
        },
    ),
    "mamba2": Architecture(
        "attn_norm ssm_in ssm_conv1d+ ssm_dt.bias ssm_a ssm_d ssm_norm ssm_out",
        TIED,
        metadata=lambda z: {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.head_count_kv": None,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": INNER,
            "ssm.state_size": STATE,
            "ssm.time_step_rank": STEPS,
            "ssm.group_count": 1,
        },
    ),
    "qwen35": Architecture(  # where it has three blocks, the last one drafts
        qwen35,
        shapes=delta_net,
        metadata=lambda z: {
            **head_width(z),
            "nextn_predict_layers": int(z.n_layer > 2),
            "full_attention_interval": 2,
            "rope.dimension_count": z.n_head_dim // 4,
            "rope.dimension_sections": [3, 3, 2, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": VALUE_HEADS * HEAD_STATE,
            "ssm.state_size": HEAD_STATE,
            "ssm.time_step_rank": VALUE_HEADS,
            "ssm.group_count": KEY_HEADS,
        },
    ),
    "t5": Architecture(
        "",
        t5,
        all_kv=True,
        metadata=lambda z: {
            **head_width(z),
            "decoder_block_count": z.n_layer - 1,
            "decoder_start_token_id": 0,
            "attention.relative_buckets_count": 32,
        },
    ),
}


def tensors_of(made: Architecture, z: Sizes) -> Iterator[tuple[str, str, Shape]]:
    """(full name, name without block and suffix, shape) of each tensor, in the order of the file."""
    shapes = shapes_of(z, made.n_ff_expert or z.n_ff, made.n_ff_shared) | made.shapes(z)
    names = (made.head if isinstance(made.head, str) else made.head(z)).split()
    for i in range(z.n_layer):
        layer = made.layer if isinstance(made.layer, str) else made.layer(i)
        names += [f"blk.{i}.{name}" for name in layer.split()]
    for marked in names:
        name = marked.removesuffix("+")
        role = re.sub(r"^(enc\.|dec\.)?(blk\.\d+\.)?(cross_)?", "", name)
        shape = shapes.get(role, (z.n_embd,))
        yield name if role in BARE else f"{name}.weight", role, shape
        if marked != name:
            yield f"{name}.bias", "bias", shape[1:] or shape


def write_gguf(
    path: str | Path,
    arch: str,
    *,
    weight_type: str = "F16",
    metadata: dict[str, Any] | None = None,
    chat_template: str | None = None,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] = add_byte_bpe,
    split_max_tensors: int = 0,
    seed: int = 0,
    residual: float = 1.0,
    **sizes: int,
) -> Path:
    """Write a tiny random model of ARCHITECTURES[arch] to `path` and return the file to load.

    weight_type: ggml type of the matrices (F16 where rows do not fit its blocks). metadata: keys to add, replace, or
    (None) leave out. tokenizer: stores a vocabulary of so many tokens. split_max_tensors: tensors per part of a split
    file, 0 for one file. residual: how much blocks add, of F16 and F32; little: the last token decides the next, and a
    block that drafts is often right. sizes: fields of Sizes.
    """
    made, z = ARCHITECTURES[arch], replace(Sizes(), **sizes)
    if made.all_kv:
        z = replace(z, n_head_kv=z.n_head)
    tensors = list(tensors_of(made, z))
    name = re.sub("-(tied|moe|fused)$", "", arch)
    values: dict[str, Any] = {
        "context_length": z.n_ctx,
        "embedding_length": z.n_embd,
        "block_count": z.n_layer,
        "feed_forward_length": z.n_ff,
        "vocab_size": z.n_vocab,
        "attention.head_count": z.n_head,
        "attention.head_count_kv": z.n_head_kv,
        f"attention.layer_norm_{'' if made.layer_norm else 'rms_'}epsilon": 1e-5,
    }
    if any(role == "ffn_gate_inp" for _, role, _ in tensors):
        values |= {"expert_count": z.n_expert, "expert_used_count": z.n_expert_used}
    values = {f"{name}.{key}": value for key, value in (values | made.metadata(z)).items()} | (metadata or {})
    writer = gguf.GGUFWriter(str(path), name, split_max_tensors=split_max_tensors)
    writer.add_name("tiny random model")  # llama.cpp demands certain tokens of what is called phi-3
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            ADD[type(value)](writer, key, value)
    tokenizer(writer, z.n_vocab)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    rng = np.random.default_rng(seed)
    for full, role, shape in tensors:
        data, raw = random_tensor(role, shape, weight_type, rng)
        if role in ADDED and raw is None:
            data = (data * residual).astype(data.dtype)
        writer.add_tensor(full, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not split_max_tensors:
        return Path(path)
    n_parts = -(-len(tensors) // split_max_tensors)
    return Path(path).with_name(f"{Path(path).stem}-00001-of-{n_parts:05d}.gguf")


def random_tensor(
    role: str, shape: Shape, weight_type: str, rng: np.random.Generator
) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType | None]:
    """Data of one tensor, numpy order (ne reversed), and the ggml type of raw bytes."""
    rows = tuple(reversed(shape))
    if role in STATES:
        values = 0.5 * rng.standard_normal(rows, np.float32)
        return (-np.abs(values) if role == "ssm_a" else values), None
    if role.endswith("bias"):
        return 0.01 * rng.standard_normal(rows, np.float32), None
    if role.endswith("norm") or role in VECTORS:
        return np.ones(rows, np.float32) + 0.1 * rng.standard_normal(rows, np.float32), None
    if role == "nextn.eh_proj":  # of embedding and hidden state the embedding
        return np.eye(*rows, dtype=np.float16), None
    wanted = gguf.GGMLQuantizationType[weight_type]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[wanted]
    if shape[0] % block_size or weight_type in ("F32", "F16"):
        values = (rng.standard_normal(rows, np.float32) * np.float32(shape[0] ** -0.5)).astype(np.float32)
        return (values if weight_type == "F32" else values.astype(np.float16)), None
    blocks = random_blocks(weight_type, int(np.prod(shape)) // block_size, shape[0] ** -0.5, rng)
    return blocks.reshape(*rows[:-1], shape[0] // block_size * block_bytes), wanted
