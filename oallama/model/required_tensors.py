"""Tensors that llama.cpp requires to load a model of an architecture.

From load_arch_tensors in llama.cpp's src/models/<architecture>.cpp, for architectures whose required tensors follow
from the name and the number of layers alone. For others llama.cpp reports missing tensors when it loads them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from oallama.model.gguf_file import DOWNLOAD_AGAIN, GgufFile, fault, quoted
from oallama.model.hyperparameters import Hyperparameters

_QKV = "attn_q attn_k attn_v"  # or attn_qkv instead of the three
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_LLAMA = ("attn_norm", _QKV, "attn_output", "ffn_norm", *_FFN)
_QK_NORM = ("attn_q_norm", "attn_k_norm")
_POST_NORM = ("post_attention_norm", "post_ffw_norm")
_GPT2 = ("attn_norm+", "attn_qkv+", "attn_output+", "ffn_norm+", "ffn_up+", "ffn_down+")  # +: with a bias

_IN_LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral3", "minicpm", "granite", "qwen2", "qwen2vl", "gemma", "smollm3"), _LLAMA),
    "internlm2": _LLAMA,
    "qwen3": (*_LLAMA, *_QK_NORM),
    "gemma2": (*_LLAMA, *_POST_NORM),
    "gemma3": (*_LLAMA, *_POST_NORM, *_QK_NORM),
    "olmo": (_QKV, "attn_output", *_FFN),
    "olmo2": (_QKV, "attn_output", *_QK_NORM, *_POST_NORM, *_FFN),
    "command-r": ("attn_norm", _QKV, "attn_output", *_FFN),
    "cohere2": ("attn_norm", _QKV, "attn_output", *_FFN),
    "seed_oss": ("attn_norm", _QKV, "attn_output", "post_attention_norm", *_FFN),
    "glm4": ("attn_norm", _QKV, "attn_output", "ffn_norm", *_POST_NORM, "ffn_up", "ffn_down"),
    "arcee": ("attn_norm", _QKV, "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    "phi3": ("attn_norm", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    "phi2": ("attn_norm+", _QKV, "attn_output+", "ffn_up+", "ffn_down+"),
    "stablelm": ("attn_norm+", _QKV, "attn_output", *_FFN),
    "nemotron": ("attn_norm+", _QKV, "attn_output", "ffn_norm+", "ffn_up", "ffn_down"),
    "starcoder2": ("attn_norm+", _QKV, "attn_output+", "ffn_norm+", "ffn_up+", "ffn_down+"),
    **dict.fromkeys(("gpt2", "gptneox", "bloom"), _GPT2),
    "falcon": ("attn_norm+", "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
}

_OUTSIDE: dict[str, tuple[str, ...]] = {
    "olmo": (),
    "olmo2": ("output_norm", "output"),
    "internlm2": ("output_norm", "output"),
    "phi2": ("output_norm+", "output+"),
    "gptneox": ("output_norm+", "output"),
    **dict.fromkeys(("stablelm", "nemotron"), ("output_norm+", "output")),
    **dict.fromkeys(("starcoder2", "falcon"), ("output_norm+",)),
    "gpt2": ("position_embd", "output_norm+"),
    "bloom": ("token_embd_norm+", "output_norm+"),
}
"""Required tensors outside layers, of architectures that need others than output_norm alone."""


def check_required(gguf: GgufFile, h: Hyperparameters, layers: set[int]) -> None:
    """Raise ModelFileError for the first missing tensor. layers: those that have tensors."""
    if gguf.arch not in _IN_LAYERS or (h.n_layer_nextn and 0 not in layers):  # a file of prediction blocks only
        return
    tensors = gguf.tensor_by_name
    for name in _required(gguf, h):
        if name not in tensors:
            block = name.rpartition(".")[0].rpartition(".")[0]
            others = [other for other in tensors if other.startswith(f"{block}." if block else "")]
            unknown = set(others) - set(_required(gguf, h))
            close = difflib.get_close_matches(name, sorted(unknown), 1, 0.85)
            hint = f"; is {quoted(close[0])} meant to be it?" if close else ""
            message = (
                f"the file lacks tensor {quoted(name)}, which every {gguf.arch} model of {h.n_layer} blocks has{hint}"
            )
            raise fault(gguf.path, 8, message, DOWNLOAD_AGAIN)


def _required(gguf: GgufFile, h: Hyperparameters) -> Iterator[str]:
    for role in _OUTSIDE.get(gguf.arch, ("output_norm",)):
        yield from _names("", role)
    for layer in range(h.n_layer - h.n_layer_nextn):
        block = f"blk.{layer}."
        for role in _IN_LAYERS[gguf.arch]:
            if h.n_expert and role in _FFN:
                continue
            if role == _QKV and f"{block}attn_qkv.weight" in gguf.tensor_by_name:
                continue
            yield from _names(block, role)


def _names(block: str, roles: str) -> Iterator[str]:
    for role in roles.split():
        name = role.removesuffix("+")
        yield f"{block}{name}.weight"
        if name != role:
            yield f"{block}{name}.bias"
