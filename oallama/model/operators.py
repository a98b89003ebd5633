"""The weight-bearing mul-mats of a model's graph, from its tensor names alone, in the order llama.cpp runs them.

tests/e2e/test_operator_trace.py compares this list with the graph of a real decode (trace.py) for every architecture
the tests can write. Architectures it does not know get the common order, which is a guess; roles it does not know are
no operators.
"""

from __future__ import annotations

from oallama.core.types import Operator, Shape
from oallama.model.gguf_file import GgufFile, TensorInfo
from oallama.model.hyperparameters import Hyperparameters, hyperparameters, number
from oallama.model.roles import (
    FIRST_ROLES,
    LAST_ROLES,
    LAYER_ORDER,
    MUL_MAT_ID_ROLES,
    MUL_MAT_ROLES,
    TensorRole,
    tensor_role,
)

# Architectures whose attention runs through llama.cpp's interleaved sliding-window cache, which takes k before v, and
# whether they do so when the file states no window (a stated window of 0 switches it off).
_SLIDING_WINDOW = {
    "gemma2": True, "llama4": True, "cohere2": True, "cohere2moe": True, "gpt-oss": True, "gemma3n": True,
    "gemma4": True, "exaone-moe": True, "granite_swa": True, "maple": True, "mimo2": True, "muse-glimmer": True,
    "spark2_5": True, "step35": True,
    "afmoe": False, "exaone4": False, "gemma3": False, "laguna": False, "lfm2": False, "mellum": False, "olmo2": False,
    "plamo3": False, "smallthinker": False,
}  # fmt: skip

_PARALLEL_FFN = frozenset({"falcon", "command-r", "cohere2", "cohere2moe", "plamo"})
"""Attention and FFN both read the layer's input, and the sum of the two is built FFN first: attn_output runs last."""

_NO_OUTPUT = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
     "t5encoder", "gemma-embedding", "llama-embed"}
)  # fmt: skip
"""Embedding models: a missing output.weight does not mean that the embedding is used as one."""


_NO_CACHE = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Diffusion models: like the embedding models, they attend without a cache, which takes k before v too."""


def operators(gguf: GgufFile) -> tuple[Operator, ...]:
    """Every weight that a mul-mat of one decode reads, in graph order; a tied embedding once, at the end."""
    h = hyperparameters(gguf)
    named = [(tensor, tensor_role(tensor.name)) for tensor in gguf.tensors]
    found = [(tensor, role) for tensor, role in named if _is_operator(role, h)]
    if "output.weight" not in gguf.tensor_by_name and gguf.arch not in _NO_OUTPUT:
        found += [(tensor, role) for tensor, role in named if tensor.name == "token_embd.weight"]
    found.sort(key=lambda pair: _graph_position(gguf, pair[1]))
    return tuple(_operator(tensor, role, h) for tensor, role in found)


def _is_operator(role: TensorRole, h: Hyperparameters) -> bool:
    if role.suffix not in ("weight", "") or role.role not in MUL_MAT_ROLES:
        return False
    return role.layer is None or bool(role.side) or role.layer < h.n_layer - h.n_layer_nextn


def _graph_position(gguf: GgufFile, role: TensorRole) -> tuple[int, int, float]:
    """A key that sorts tensors into the order of the graph: side, layer, place in the layer."""
    if role.layer is None:
        if role.role in FIRST_ROLES:
            return (0, 0, FIRST_ROLES.index(role.role))
        return (3, 0, LAST_ROLES.index(role.role) if role.role in LAST_ROLES else len(LAST_ROLES))
    place: float = LAYER_ORDER[role.role]
    if role.role == "attn_k" and _k_before_v(gguf):
        place = LAYER_ORDER["attn_v"] - 0.5
    if role.role == "attn_output" and _output_after_ffn(gguf):
        place = len(LAYER_ORDER)
    return (1 if role.side == "enc" else 2, role.layer, place)


def _k_before_v(gguf: GgufFile) -> bool:
    if gguf.arch in _NO_OUTPUT | _NO_CACHE:
        return True
    by_default = _SLIDING_WINDOW.get(gguf.arch)
    return by_default is not None and number(gguf, "attention.sliding_window", int(by_default)) > 0


def _output_after_ffn(gguf: GgufFile) -> bool:
    if gguf.arch == "gptneox":
        return bool(gguf.metadata.get("gptneox.use_parallel_residual"))
    return gguf.arch in _PARALLEL_FFN


def _operator(tensor: TensorInfo, role: TensorRole, h: Hyperparameters) -> Operator:
    k, n, e, *_ = (*tensor.shape, 1, 1)
    shape: Shape = (k, n, e)
    routed = role.role in MUL_MAT_ID_ROLES
    used = h.n_expert_used[role.layer] if routed and role.layer is not None else 1
    return Operator(
        name=tensor.name,
        layer=role.layer,
        role=role.role,
        op="MUL_MAT_ID" if routed else "MUL_MAT",
        type=tensor.type,
        shape=shape,
        bytes=tensor.n_bytes,
        active_fraction=used / e if routed else 1.0,
        n_expert_used=used,
    )
