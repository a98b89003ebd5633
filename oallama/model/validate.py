"""Checks that a GGUF's metadata and tensors are consistent, where llama.cpp checks late, by abort, or not at all.

llama.cpp b11549 refuses or dies on every file that is refused here. Faults that it refuses cleanly (an unknown
architecture, a missing tensor, a tensor of another shape) are left to it, so that no working model is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from oallama.model.gguf_file import CONVERT_AGAIN, GgufArray, GgufFile, quoted
from oallama.model.hyperparameters import Hyperparameters, hyperparameters, number
from oallama.model.roles import tensor_role
from oallama.model.validate_tensors import validate_tensors
from oallama.model.validate_tokenizer import validate_tokenizer

LLAMA_MAX_LAYERS = 512
LLAMA_MAX_EXPERTS = 1024
"""Numbers above which llama.cpp b11549 aborts (llama-hparams.h)."""

_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_INT32_MAX = 2**31 - 1
_MAX_WIDTH = 1 << 20  # bound on the width of a residual stream or a head; the widest known model has 2^14
_MAX_FF = 1 << 24  # a feed-forward length may also be as great as the greatest extent of a tensor

_REQUIRED_COUNTS = {
    "block_count": LLAMA_MAX_LAYERS,
    "context_length": _INT32_MAX,
    "embedding_length": _MAX_WIDTH,
}
"""Keys without their architecture, which must be present and above 0, and their greatest values."""

_COUNTS: dict[int, tuple[str, ...]] = {
    LLAMA_MAX_LAYERS: ("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step"),
    LLAMA_MAX_EXPERTS: (
        "expert_count", "expert_group_count", "expert_group_used_count", "expert_shared_count", "experts_per_group"
    ),
    _MAX_WIDTH: (
        "attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
        "attention.key_length_swa", "attention.value_length_swa", "attention.q_lora_rank", "attention.kv_lora_rank",
        "rope.dimension_count", "ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
        "wkv.head_size",
    ),
    _MAX_FF: ("ssm.inner_size", "expert_shared_feed_forward_length"),
    _INT32_MAX: (
        "vocab_size", "full_attention_interval", "attention.sliding_window", "attention.output_group_count"
    ),
}  # fmt: skip
"""Optional keys by their greatest value."""

# Keys that llama.cpp divides by in these architectures. In others they may be zero, as in models that it saved.
_DELTA_NET = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
_MAMBA2 = frozenset({"mamba2", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"})
_STATE_SPACE = _DELTA_NET | _MAMBA2 | {"mamba", "jamba", "plamo2"}
_DIVISORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("experts_per_group", frozenset({"grovemoe"})),
    ("interleave_moe_layer_step", frozenset({"ernie4_5-moe"})),
    ("full_attention_interval", _DELTA_NET | {"minimax-01"}),
    ("attention.output_group_count", frozenset({"deepseek4"})),
    ("ssm.conv_kernel", _STATE_SPACE),
    ("ssm.inner_size", _STATE_SPACE),
    ("ssm.state_size", _STATE_SPACE),
    ("ssm.time_step_rank", _STATE_SPACE),
    ("ssm.group_count", _DELTA_NET | _MAMBA2),
    ("wkv.head_size", frozenset({"rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})),
)

_LAYER_COUNTS = {
    "attention.head_count": _MAX_WIDTH,
    "attention.head_count_kv": _MAX_WIDTH,
    "feed_forward_length": _MAX_FF,
    "expert_feed_forward_length": _MAX_FF,
    "expert_used_count": LLAMA_MAX_EXPERTS,
}
"""Counts that may be one number or one per layer, and their greatest values."""

_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon")
_WITHOUT_ROPE = frozenset({"glm5-next", "kimi-linear", "kimi-k3"})  # latent attention that turns nothing
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")


def validate(gguf: GgufFile) -> None:
    """Raise ModelFileError for the first fault in metadata or tensors that llama.cpp does not handle safely."""
    arch = _architecture(gguf)
    for key, most in _REQUIRED_COUNTS.items():
        _check_count(gguf, f"{arch}.{key}", most, least=1)
    for most, keys in _COUNTS.items():
        for key in keys:
            _check_count(gguf, f"{arch}.{key}", _most(gguf, key, most))
    for key, architectures in _DIVISORS:
        entry = gguf.entries.get(f"{arch}.{key}")
        if arch in architectures and entry and entry.value == 0:
            raise gguf.fault(f"{arch}.{key}", f"{quoted(f'{arch}.{key}')} is 0, and llama.cpp divides by it")
    for key, most in _LAYER_COUNTS.items():
        _check_count(gguf, f"{arch}.{key}", _most(gguf, key, most), n_layer=number(gguf, "block_count"))
    _floats(gguf, arch)
    h = hyperparameters(gguf)
    _heads(gguf, h)
    _latent_attention(gguf, h)
    _experts(gguf, h)
    if h.n_layer_nextn >= h.n_layer:
        message = f"{h.n_layer_nextn} of {h.n_layer} blocks only predict further tokens, so no other is left"
        raise gguf.fault(f"{arch}.nextn_predict_layers", message)
    validate_tokenizer(gguf)
    validate_tensors(gguf, h)


def _architecture(gguf: GgufFile) -> str:
    entry = gguf.entry("general.architecture", "string", required=True)
    assert entry is not None
    arch = str(entry.value)
    if not _ARCHITECTURE.fullmatch(arch):
        message = f"general.architecture is {quoted(arch)}, which is not an architecture name"
        raise gguf.fault("general.architecture", message)
    kind = gguf.entry("general.type", "string")
    if arch == "clip" or (kind and kind.value not in ("model", "")):
        what = "a vision or audio projector" if arch == "clip" else f"of type {quoted(str(kind.value if kind else ''))}"
        raise gguf.fault(
            "general.architecture", f"the file is {what}, not a language model", "name the model's own file"
        )
    gguf.entry("general.name", "string")
    gguf.entry("general.file_type", "uint32")
    gguf.entry("tokenizer.chat_template", "string")
    return arch


def _most(gguf: GgufFile, key: str, most: int) -> int:
    """Return the greatest allowed value of a count; for a feed-forward length, from the tensors."""
    if not key.endswith("feed_forward_length"):
        return most
    extents = (extent for tensor in gguf.tensors for extent in tensor.shape)
    return min(max(most, *extents) if gguf.tensors else most, _INT32_MAX)


def _check_count(gguf: GgufFile, key: str, most: int, least: int = 0, n_layer: int | None = None) -> None:
    """Check a count; one that may not be 0 must be present. n_layer: it may have a value for each layer."""
    entry = gguf.entries.get(key)
    values: Sequence[int] = ()
    if n_layer is not None and entry is not None and isinstance(entry.value, GgufArray):
        if entry.type not in ("array[uint32]", "array[int32]"):
            raise gguf.fault(key, f"{quoted(key)} is of type {entry.type} instead of uint32", CONVERT_AGAIN)
        if len(entry.value) != n_layer:
            raise gguf.fault(key, f"{quoted(key)} has {len(entry.value)} elements for {n_layer} layers", CONVERT_AGAIN)
        values = entry.value.values
    elif entry := gguf.entry(key, "uint32", required=least > 0):
        values = (entry.value,)
    for value in values:
        if not least <= value <= most:
            raise gguf.fault(key, f"{quoted(key)} is {value}, not within {least} to {most}")


def _floats(gguf: GgufFile, arch: str) -> None:
    """Norm epsilons, and how rope is scaled: ggml asserts them, and NaN spoils every token."""
    for key, value in gguf.metadata.items():
        if key.startswith(f"{arch}.") and isinstance(value, float) and math.isnan(value):
            raise gguf.fault(key, f"{quoted(key)} is not a number")
    keys = [f"{arch}.{name}" for name in _EPSILONS]
    epsilons = {key: entry.value for key in keys if (entry := gguf.entry(key, "float32"))}
    if not epsilons:
        raise gguf.fault(keys[0], f"the metadata lack {quoted(keys[0])}", CONVERT_AGAIN)
    for key, epsilon in epsilons.items():
        if not 0 <= epsilon < 1:
            raise gguf.fault(key, f"a norm's epsilon is {epsilon}, not within 0 to 1")
    key = f"{arch}.rope.scaling.type"
    scaling = gguf.entry(key, "string")
    if scaling and scaling.value not in _ROPE_SCALING:
        message = f"the rope scaling type is {quoted(str(scaling.value))} instead of one of {', '.join(_ROPE_SCALING)}"
        raise gguf.fault(key, message, CONVERT_AGAIN)


def _heads(gguf: GgufFile, h: Hyperparameters) -> None:
    key = f"{gguf.arch}.attention.head_count"
    if not any(h.n_head) and any(tensor_role(tensor.name).role in ("attn_q", "attn_qkv") for tensor in gguf.tensors):
        message = "the tensors are those of attention, but the metadata specify no heads"
        raise gguf.fault(key, message, CONVERT_AGAIN)
    for layer, (n_head, n_head_kv) in enumerate(zip(h.n_head, h.n_head_kv, strict=True)):
        if n_head and n_head_kv and n_head % n_head_kv:
            message = f"layer {layer} has {n_head} heads, which is not a multiple of its {n_head_kv} KV heads"
            raise gguf.fault(key, message)
    width = max(h.n_embd_head_k, h.n_embd_head_v, number(gguf, "attention.key_length_mla"))
    most = max(*h.n_head, *h.n_head_kv)
    if most * width > _INT32_MAX:  # llama.cpp multiplies these in 32 bits, and a wrapped product passes its shape check
        raise gguf.fault(key, f"{most} heads of width {width} are more than llama.cpp can count")
    if most and not (h.n_embd_head_k and h.n_embd_head_v):
        raise gguf.fault(key, f"{most} heads in an embedding of {h.n_embd} have width 0")
    rope = number(gguf, "rope.dimension_count", 2)
    if most and (rope > width or rope % 2 or (rope == 0 and gguf.arch not in _WITHOUT_ROPE)):
        message = f"rope has {rope} dimensions, which must be even and at most the head width, {width}"
        raise gguf.fault(f"{gguf.arch}.rope.dimension_count", message)


def _latent_attention(gguf: GgufFile, h: Hyperparameters) -> None:
    """MLA's cache shapes, which llama.cpp asserts while it builds the graph: one KV head as wide as latent and rope
    when attn_k_b and attn_v_b are absorbed (deepseek2), as many KV heads as heads when they are not (minicpm3)."""
    key = f"{gguf.arch}.attention.head_count_kv"
    if gguf.arch == "minicpm3" and h.n_head_kv != h.n_head:
        raise gguf.fault(key, f"minicpm3 needs as many KV heads as heads, not {max(h.n_head_kv)} for {max(h.n_head)}")
    if gguf.arch == "deepseek2" and number(gguf, "attention.key_length_mla"):
        latent = number(gguf, "attention.kv_lora_rank") + number(gguf, "rope.dimension_count")
        if set(h.n_head_kv) != {1} or h.n_embd_head_k != latent:
            message = f"latent attention needs one KV head {latent} wide, not {max(h.n_head_kv)} of {h.n_embd_head_k}"
            raise gguf.fault(key, message)


def _experts(gguf: GgufFile, h: Hyperparameters) -> None:
    """llama.cpp asserts each of these while it reads the hyperparameters."""
    if gguf.arch.startswith("hunyuan") and h.n_expert <= 1:
        return  # read as a dense model
    n_expert, used = h.n_expert, max(h.n_expert_used)
    if used > n_expert or (used == 0) != (n_expert == 0):
        message = f"{used} of {n_expert} experts are used, which is impossible"
        raise gguf.fault(f"{gguf.arch}.expert_count", message)
    groups, groups_used = number(gguf, "expert_group_count"), number(gguf, "expert_group_used_count")
    if groups and (groups >= n_expert or n_expert % groups or (groups > 1 and not 0 < groups_used < groups)):
        message = f"{n_expert} experts in {groups} groups, {groups_used} of them used, are impossible"
        raise gguf.fault(f"{gguf.arch}.expert_group_count", message)
