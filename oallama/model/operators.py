"""The weight-bearing mul-mats of a model's graph, from its tensor names alone, in the order llama.cpp runs them.

Compared with real decodes in tests/e2e/test_operator_trace.py, and with graphs recorded from 123 architectures in
tests/golden/test_operator_graphs.py. An unknown architecture gets the common order, which is a guess; a tensor of an
unknown role is not an operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod

from oallama.core.types import FIRST_ROLES, Operator, Shape
from oallama.model.gguf_file import GgufFile, TensorInfo
from oallama.model.hyperparameters import Hyperparameters, hyperparameters, number
from oallama.model.roles import (
    LAST_ROLES,
    LAYER_ORDER,
    MUL_MAT_ID_ROLES,
    MUL_MAT_ROLES,
    TensorRole,
    tensor_role,
)
from oallama.model.rope import rotates

# Architectures whose attention runs through llama.cpp's interleaved sliding-window cache, which takes k before v:
# always, or if the file states a window.
_SLIDING_WINDOW = frozenset(
    {"gemma2", "gemma3n", "gemma4", "cohere2", "cohere2moe", "gpt-oss", "exaone-moe", "granite_swa", "maple", "mimo2",
     "muse-glimmer", "spark2_5", "step35"}
)  # fmt: skip
_SLIDING_IF_STATED = frozenset(
    {"afmoe", "gemma3", "laguna", "lfm2", "lfm2moe", "mellum", "olmo2", "plamo3", "smallthinker"}
)

_PARALLEL_FFN = frozenset({"falcon", "command-r", "cohere2", "cohere2moe", "plamo"})
"""Attention and FFN both read the layer's input, and the sum of the two is built FFN first: attn_output runs last."""

_RESIDUAL_BETWEEN = frozenset({"command-r", "cohere2", "cohere2moe"})
"""The parallel architectures that add the residual to the FFN's result before attn_output runs. By name: no tensor and
no key tells in which order llama.cpp adds, and a no_alloc load shows no graph. tests/golden/test_operator_graphs.py
compares."""

_HEADS = frozenset({"attn_qkv", "attn_q", "attn_k", "attn_v"})

_EARLIER = {
    "smallthinker": ("attn_output", ("ffn_gate_inp",)),
    "arctic": ("attn_output", ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")),
    "glm5-next": ("attn_q_b", ("indexer.attn_q_b", "indexer.proj")),
    "qwen4exp": ("attn_q", ("indexer.q_proj",)),
}
"""(a role, the roles that run right before it, and in other architectures later): routers and experts that read the
layer's input, not what attention makes of it; queries of sparse attention, which chooses positions first."""

_INPUT_F32 = {"mistral4": ("ffn_down_exps",)}
"""Mul-mats whose input exceeds F16's range: ggml_prec_set_src(…, GGML_PREC_F32, 1) in llama.cpp."""

_NO_OUTPUT = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
     "t5encoder", "gemma-embedding", "llama-embed"}
)  # fmt: skip
"""Embedding models: without output.weight they have no output, and the embedding is not used as such."""


_NO_CACHE = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Diffusion models: like the embedding models, they attend without a cache, which takes k before v too."""


def operators(gguf: GgufFile) -> tuple[Operator, ...]:
    """Return every weight that a mul-mat of a decode reads, in graph order; a tied embedding once, at the end."""
    h = hyperparameters(gguf)
    named = [(tensor, tensor_role(tensor.name)) for tensor in gguf.tensors]
    pairs = [(tensor, role) for tensor, role in named if _is_operator(role, h)]
    if "output.weight" not in gguf.tensor_by_name and gguf.arch not in _NO_OUTPUT:
        pairs += [(tensor, role) for tensor, role in named if tensor.name == "token_embd.weight"]
    roles: dict[int | None, set[str]] = {}
    for _, role in pairs:
        roles.setdefault(role.layer, set()).add(role.role)
    pairs.sort(key=lambda pair: _graph_position(gguf, pair[1], roles[pair[1].layer]))
    shapes = {(role.layer, role.role): tensor.shape for tensor, role in pairs}
    rows = [_operator(gguf, tensor, role, h, _holds_gate_and_up(tensor, role, shapes)) for tensor, role in pairs]
    normed = {role.layer for _, role in named if _is_norm_behind_attention(role)}
    for i, (previous, operator) in enumerate(pairwise(rows), start=1):
        if previous.layer == operator.layer and _adjoins(gguf, previous, operator, operator.layer in normed):
            rows[i] = replace(operator, adjoins=True)
    return tuple(rows)


def _is_norm_behind_attention(role: TensorRole) -> bool:
    within = role.role.startswith("attn_") and role.role != "attn_output_norm"
    return "norm" in role.role and not within


def _adjoins(gguf: GgufFile, previous: Operator, operator: Operator, normed: bool) -> bool:
    """Whether llama.cpp computes nothing between two operators of a layer: of what attention reads, or of attention's
    output and an FFN that reads the layer's input, in either order. normed: whether the layer has a norm behind
    attention."""
    if {previous.role, operator.role} <= _HEADS:
        return previous.role == "attn_v" or not _is_changed(gguf, previous)
    if previous.role == "attn_output":
        return _has_attn_norm(gguf, operator.layer) and not normed and operator.role in ("ffn_gate", "ffn_up")
    added = previous.biased or gguf.arch in _RESIDUAL_BETWEEN
    return previous.role == "ffn_down" and operator.role == "attn_output" and not added


def _is_changed(gguf: GgufFile, head: Operator) -> bool:
    """Whether attention reads more of a Q or K than the product with its bias."""
    normed = f"{head.name.removesuffix('.weight')}_norm.weight" in gguf.tensor_by_name
    scaled = gguf.arch == "llama4" and head.role == "attn_q"  # in layers without RoPE
    return normed or scaled or head.layer is None or rotates(gguf, head.layer)


def _has_attn_norm(gguf: GgufFile, layer: int | None) -> bool:
    return f"blk.{layer}.attn_norm.weight" in gguf.tensor_by_name


def _is_operator(role: TensorRole, h: Hyperparameters) -> bool:
    if role.suffix not in ("weight", "") or role.role not in MUL_MAT_ROLES:
        return False
    if role.layer is None:
        return True
    return role.role in LAYER_ORDER and (bool(role.side) or role.layer < h.n_layer - h.n_layer_nextn)


def _graph_position(gguf: GgufFile, role: TensorRole, layer_roles: set[str]) -> tuple[int, int, float]:
    """Return a key that sorts tensors in graph order: side, layer, place in the layer. layer_roles: of this layer."""
    if role.layer is None:
        if role.role in FIRST_ROLES:
            return (0, 0, FIRST_ROLES.index(role.role))
        return (3, 0, LAST_ROLES.index(role.role) if role.role in LAST_ROLES else len(LAST_ROLES))
    place: float = LAYER_ORDER[role.role]
    following, earlier = _EARLIER.get(gguf.arch, ("", ()))
    if role.role == "attn_k" and _k_before_v(gguf, layer_roles):
        place = LAYER_ORDER["attn_v"] - 0.5
    elif role.role == "attn_output" and _output_after_ffn(gguf):
        place = len(LAYER_ORDER)
    elif role.role in earlier:
        place = LAYER_ORDER[following] - 1 + place / len(LAYER_ORDER)
    return (1 if role.side == "enc" else 2, role.layer, place)


def _k_before_v(gguf: GgufFile, layer_roles: set[str]) -> bool:
    window = number(gguf, "attention.sliding_window", 1 if gguf.arch == "llama4" else 0)
    return (
        gguf.arch in _NO_OUTPUT | _NO_CACHE | _SLIDING_WINDOW
        or (gguf.arch in _SLIDING_IF_STATED | {"llama4"} and window > 0)
        or (gguf.arch == "exaone4" and number(gguf, "block_count") == 64)  # only the largest of them slides
        or (gguf.arch == "minimax-m3" and "indexer.k_proj" in layer_roles)
        or "ssm_f_a" in layer_roles  # a layer of Kimi's delta attention
    )


def _output_after_ffn(gguf: GgufFile) -> bool:
    if gguf.arch == "gptneox":
        return bool(gguf.metadata.get("gptneox.use_parallel_residual"))
    return gguf.arch in _PARALLEL_FFN


def _holds_gate_and_up(
    tensor: TensorInfo, role: TensorRole, shapes: Mapping[tuple[int | None, str], tuple[int, ...]]
) -> bool:
    """Whether an up without a gate is twice as wide as its down's input, as in phi3 and glm4: it holds gate and up.

    shapes: of every operator by layer and role.
    """
    if "ffn_gate_up" in role.role:
        return True
    if "ffn_up" not in role.role or (role.layer, role.role.replace("ffn_up", "ffn_gate")) in shapes:
        return False
    down = shapes.get((role.layer, role.role.replace("ffn_up", "ffn_down")))
    return down is not None and (*tensor.shape, 1)[1] == 2 * down[0]


def _by_sequence(gguf: GgufFile, role: TensorRole) -> bool:
    """Whether the operator's input has a dimension for sequences in llama.cpp, as in layers with a state: short
    convolutions, RWKV, Mamba 1 and layers like it (with ssm_x), MiniMax-01's linear attention."""
    if role.role.startswith(("shortconv.", "time_mix_", "channel_mix_")):
        return True
    if role.role.startswith("ssm_"):
        return f"blk.{role.layer}.ssm_x.weight" in gguf.tensor_by_name
    return gguf.arch == "minimax-01" and role.role in ("attn_qkv", "attn_gate", "attn_output")


def _operator(gguf: GgufFile, tensor: TensorInfo, role: TensorRole, h: Hyperparameters, gate_up: bool) -> Operator:
    k, n, *more = (*tensor.shape, 1)
    e = prod(more)
    shape: Shape = (k, n, e)
    routed = role.role in MUL_MAT_ID_ROLES
    used = h.n_expert_used[role.layer] if routed and role.layer is not None else 1
    stem = tensor.name.removesuffix(".weight")
    return Operator(
        name=tensor.name,
        layer=role.layer,
        role=role.role,
        op="MUL_MAT_ID" if routed else "MUL_MAT",
        type=tensor.type,
        shape=shape,
        bytes=tensor.n_bytes,
        active_fraction=min(1.0, used / e) if routed else 1.0,
        n_expert_used=used,
        gate_up=gate_up,
        biased=any(f"{stem}.{suffix}" in gguf.tensor_by_name for suffix in ("bias", "scale")),
        input_f32=role.role in _INPUT_F32.get(gguf.arch, ()),
        by_sequence=_by_sequence(gguf, role),
        unnormed=role.role in _HEADS and not _has_attn_norm(gguf, role.layer),
    )
