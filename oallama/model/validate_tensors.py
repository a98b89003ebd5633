"""Checks a GGUF's tensors: the embedding, types that llama.cpp can compute with, and numbers of experts."""

from __future__ import annotations

from oallama.core.ggml_types import MUL_MAT_TYPES
from oallama.model.gguf_file import CONVERT_AGAIN, GgufFile, TensorInfo, fault
from oallama.model.hyperparameters import Hyperparameters
from oallama.model.roles import INTEGER_ROLES, MUL_MAT_ID_ROLES, MUL_MAT_ROLES, TensorRole, is_f32_only, tensor_role

_UNUSUAL_EMBEDDING = frozenset({"wavtokenizer-dec"})  # its tokens are as wide as features_length

_EQUAL_WIDTHS = frozenset(
    {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi2", "phi3", "gpt2", "gptneox",
     "minicpm", "starcoder2", "olmo2", "granite", "granitemoe", "command-r", "glm4", "falcon", "bloom", "mistral3"}
)  # fmt: skip
"""Architectures whose graphs assert that keys and values of a head are equally wide."""


def validate_tensors(gguf: GgufFile, h: Hyperparameters) -> None:
    """Raise ModelFileError for the first tensor that llama.cpp could not load, or would die computing with."""
    _check_presence(gguf, h)
    if gguf.arch in _EQUAL_WIDTHS and h.n_embd_head_k != h.n_embd_head_v:
        message = f"keys are {h.n_embd_head_k} wide and values {h.n_embd_head_v}, which {gguf.arch} does not allow"
        raise gguf.fault(f"{gguf.arch}.attention.value_length", message)
    for tensor in gguf.tensors:
        role = tensor_role(tensor.name)
        _check_type(tensor, role)
        if role.role in MUL_MAT_ID_ROLES and role.suffix in ("weight", ""):
            _check_experts(tensor, role, h)


def _check_presence(gguf: GgufFile, h: Hyperparameters) -> None:
    if not gguf.tensors:
        raise fault(gguf.path, 8, "the file has no tensors", "name a file with a model's weights")
    embedding = gguf.tensor_by_name.get("token_embd.weight")
    if embedding is None:
        raise fault(gguf.path, 8, "the file lacks token_embd.weight, so it is not a language model", CONVERT_AGAIN)
    expected = (h.n_embd, h.n_vocab)
    if _all_extents(embedding.shape) != _all_extents(expected) and gguf.arch not in _UNUSUAL_EMBEDDING:
        message = f"token_embd.weight has shape {embedding.shape} instead of {expected} (n_embd, n_vocab)"
        raise fault(embedding.path, embedding.header_offset, message)


def _check_type(tensor: TensorInfo, role: TensorRole) -> None:
    one_dimensional = sum(extent > 1 for extent in tensor.shape) <= 1 and len(tensor.shape) == 1
    if is_f32_only(role) or (one_dimensional and role.role not in MUL_MAT_ROLES):
        if tensor.type != "F32" and role.role not in INTEGER_ROLES:
            raise tensor.fault(f"is of type {tensor.type}, which llama.cpp can only use as F32", CONVERT_AGAIN)
    elif tensor.type not in MUL_MAT_TYPES and not (role.role in INTEGER_ROLES and tensor.type in ("I32", "I64")):
        raise tensor.fault(f"is of type {tensor.type}, which llama.cpp cannot compute with", CONVERT_AGAIN)


def _check_experts(tensor: TensorInfo, role: TensorRole, h: Hyperparameters) -> None:
    _, _, n_matrices, more = _all_extents(tensor.shape)
    expected = h.n_expert if role.role.endswith("_exps") else n_matrices
    if more != 1 or n_matrices != expected:
        raise tensor.fault(f"of shape {tensor.shape} does not hold {h.n_expert} experts")
    if role.layer is not None and role.layer < h.n_layer and not h.n_expert_used[role.layer]:
        raise tensor.fault("holds experts, but the metadata use none", CONVERT_AGAIN)


def _all_extents(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return all four extents; a file may omit extents of 1 at the end."""
    return (*shape, 1, 1, 1)[:4]
