"""Checks a GGUF's tensors against its hyperparameters: layers, types that can be computed, shapes."""

from __future__ import annotations

from collections.abc import Callable

from oallama.core.ggml_types import MUL_MAT_TYPES
from oallama.model.gguf_file import CONVERT_AGAIN, DOWNLOAD_AGAIN, GgufFile, TensorInfo, fault
from oallama.model.hyperparameters import Hyperparameters, number
from oallama.model.required_tensors import check_required
from oallama.model.roles import INTEGER_ROLES, MUL_MAT_ID_ROLES, MUL_MAT_ROLES, TensorRole, is_f32_only, tensor_role

_UNUSUAL_EMBEDDING = frozenset({"wavtokenizer-dec"})  # its tokens are as wide as features_length

_FUSED_GATE_UP = frozenset({"phi3", "glm4"})

_CHECKED_SHAPES = frozenset(
    {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi2", "phi3", "gpt2", "gptneox",
     "minicpm", "minicpm3", "starcoder2", "olmo2", "granite", "granitemoe", "command-r", "glm4", "falcon", "bloom",
     "deepseek2", "mistral3"}
)  # fmt: skip
"""Architectures whose shapes follow from the common hyperparameters; the others' are left to llama.cpp's own check."""


_MLA = frozenset({"minicpm3", "deepseek2"})
"""Latent attention: keys and values of one head differ in width. The others' graphs assert that they do not."""


def validate_tensors(gguf: GgufFile, h: Hyperparameters) -> None:
    """Raise ModelFileError for the first tensor that llama.cpp could not load, or would die computing with."""
    _check_presence(gguf, h)
    if gguf.arch in _CHECKED_SHAPES - _MLA and h.n_embd_head_k != h.n_embd_head_v:
        message = f"keys are {h.n_embd_head_k} wide and values {h.n_embd_head_v}, which {gguf.arch} does not allow"
        raise gguf.fault(f"{gguf.arch}.attention.value_length", message)
    shapes = _Shapes(gguf, h) if gguf.arch in _CHECKED_SHAPES else None
    layers: set[int] = set()
    for tensor in gguf.tensors:
        role = tensor_role(tensor.name)
        if role.layer is not None and not role.side:
            layers.add(role.layer)
        _check_type(tensor, role)
        if role.role in MUL_MAT_ID_ROLES and role.suffix in ("weight", ""):
            _check_experts(tensor, role, h)
        if shapes:
            shapes.check(tensor, role)
    _check_layers(gguf, h, layers)
    check_required(gguf, h, layers)


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


def _check_layers(gguf: GgufFile, h: Hyperparameters, layers: set[int]) -> None:
    """Check that blocks are numbered from 0 to block_count - 1, and that each has tensors. (An encoder-decoder has two
    stacks, which may differ in height; llama.cpp checks these.)"""
    if not layers and any(tensor_role(tensor.name).side for tensor in gguf.tensors):
        return
    if layers and max(layers) >= h.n_layer:
        tensor = next(t for t in gguf.tensors if (tensor_role(t.name).layer or 0) >= h.n_layer)
        raise tensor.fault(f"is beyond the {h.n_layer} blocks the metadata state")
    without_head = h.n_layer_nextn > 0 and 0 not in layers  # a file of the extra prediction blocks only
    missing = sorted(set(range(h.n_layer - h.n_layer_nextn)) - layers)
    if missing and not without_head:
        message = f"the metadata state {h.n_layer} blocks, but block {missing[0]} has no tensors"
        raise gguf.fault(f"{gguf.arch}.block_count", message, DOWNLOAD_AGAIN)


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


def _all_extents(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return all four extents; a file may omit extents of 1 at the end."""
    return (*shape, 1, 1, 1)[:4]


class _Shapes:
    """Return the shapes that the hyperparameters require. None: an extent that no hyperparameter determines."""

    def __init__(self, gguf: GgufFile, h: Hyperparameters) -> None:
        self.arch = gguf.arch
        self.h = h
        self.k = number(gguf, "attention.key_length_mla") or h.n_embd_head_k
        self.v = number(gguf, "attention.value_length_mla") or h.n_embd_head_v
        self.rope = number(gguf, "rope.dimension_count", h.n_embd_head_k)
        self.q_rank = number(gguf, "attention.q_lora_rank") or None
        self.kv_rank = number(gguf, "attention.kv_lora_rank") or None

    def check(self, tensor: TensorInfo, role: TensorRole) -> None:
        expected = self._expected(role)
        if expected is None:
            return
        if role.suffix == "bias" and len(expected) > 1:
            expected = expected[1:]
        pairs = zip(_all_extents(expected), _all_extents(tensor.shape), strict=True)
        if any(wanted is not None and wanted != actual for wanted, actual in pairs):
            demand = tuple("any" if extent is None else extent for extent in expected)
            raise tensor.fault(f"has shape {tensor.shape} but the hyperparameters require {demand}")

    def _expected(self, role: TensorRole) -> tuple[int | None, ...] | None:
        """Return [K, N, E] of the weight of this role, also for its bias; None if unknown."""
        if role.suffix not in ("weight", "bias"):
            return None
        h = self.h
        if role.layer is None:
            outside: dict[str, tuple[int, ...]] = {
                "output": (h.n_embd, h.n_vocab),
                "position_embd": (h.n_embd, h.n_ctx_train),
                "output_norm": (h.n_embd,),
                "token_embd_norm": (h.n_embd,),
                "rope_freqs": (self.rope // 2,),
                "rope_factors_long": (self.rope // 2,),
                "rope_factors_short": (self.rope // 2,),
            }
            return outside.get(role.role)
        if role.role in _NORMS_OF_HEADS and self.arch in _HEADS_NORMED_ALIKE:
            return (self.k,)
        make = _BY_ROLE.get(role.role)
        return make(self, role.layer) if make and role.layer < h.n_layer else None

    def q(self, layer: int) -> int:
        return self.h.n_head[layer] * self.k

    def kv(self, layer: int, width: int) -> int:
        return self.h.n_head_kv[layer] * width

    def n_ff(self, layer: int) -> int:
        return self.h.n_ff[layer] * (2 if self.arch in _FUSED_GATE_UP else 1)

    def n_ff_exp(self, layer: int) -> int:
        """Return the width of a routed expert: qwen's and deepseek's own, or the dense width divided by the experts
        used."""
        h = self.h
        if not self.arch.startswith(("qwen", "deepseek")):
            return h.n_ff[layer]
        return h.n_ff_exp[layer] or h.n_ff[layer] // max(h.n_expert_used[layer], 1)


_NORMS_OF_HEADS = ("attn_q_norm", "attn_k_norm")
_HEADS_NORMED_ALIKE = frozenset({"qwen3", "qwen3moe", "gemma3"})  # else one norm over all heads, or one for each

_BY_ROLE: dict[str, Callable[[_Shapes, int], tuple[int | None, ...]]] = {
    "attn_norm": lambda s, i: (s.h.n_embd,),
    "ffn_norm": lambda s, i: (s.h.n_embd,),
    "post_attention_norm": lambda s, i: (s.h.n_embd,),
    "post_ffw_norm": lambda s, i: (s.h.n_embd,),
    "attn_q": lambda s, i: (s.h.n_embd, s.q(i)),
    "attn_k": lambda s, i: (s.h.n_embd, s.kv(i, s.k)),
    "attn_v": lambda s, i: (s.h.n_embd, s.kv(i, s.v)),
    "attn_qkv": lambda s, i: (s.h.n_embd, s.q(i) + s.kv(i, s.k) + s.kv(i, s.v)),
    "attn_output": lambda s, i: (s.h.n_head[i] * s.v, s.h.n_embd),
    "attn_q_a": lambda s, i: (s.h.n_embd, s.q_rank),
    "attn_q_b": lambda s, i: (s.q_rank, s.q(i)),
    "attn_kv_a_mqa": lambda s, i: (s.h.n_embd, s.kv_rank + s.rope if s.kv_rank else None),
    "attn_kv_b": lambda s, i: (s.kv_rank, s.h.n_head[i] * (s.k - s.rope + s.v)),
    "attn_k_b": lambda s, i: (s.k - s.rope, s.kv_rank, s.h.n_head[i]),
    "attn_v_b": lambda s, i: (s.kv_rank, s.v, s.h.n_head[i]),
    "ffn_gate": lambda s, i: (s.h.n_embd, s.h.n_ff[i]),
    "ffn_up": lambda s, i: (s.h.n_embd, s.n_ff(i)),
    "ffn_down": lambda s, i: (s.h.n_ff[i], s.h.n_embd),
    "ffn_gate_inp": lambda s, i: (s.h.n_embd, s.h.n_expert),
    "ffn_gate_up_exps": lambda s, i: (s.h.n_embd, 2 * s.n_ff_exp(i), s.h.n_expert),
    "ffn_gate_exps": lambda s, i: (s.h.n_embd, s.n_ff_exp(i), s.h.n_expert),
    "ffn_up_exps": lambda s, i: (s.h.n_embd, s.n_ff_exp(i), s.h.n_expert),
    "ffn_down_exps": lambda s, i: (s.n_ff_exp(i), s.h.n_embd, s.h.n_expert),
    "ffn_gate_shexp": lambda s, i: (s.h.n_embd, None),
    "ffn_up_shexp": lambda s, i: (s.h.n_embd, None),
    "ffn_down_shexp": lambda s, i: (None, s.h.n_embd),
}
