"""Writes the GGUF files the tests need: tiny valid models of many architectures, and hostile ones.

write_gguf(path, "qwen3moe", weight_type="Q4_0")      # loads and decodes in stock llama.cpp
write_llama_shape(path, n_layer=16, ...)              # any size, written fast (by scripts/make_model.py)
hostile(path, "tensor data overlap")                  # one of HOSTILE, which maps each kind to the phrase expected
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from make_model import write_shape

from gguf_factory.hostile import HOSTILE, hostile
from gguf_factory.models import ARCHITECTURES, write_gguf
from gguf_factory.raw import RawGguf
from oallama.model.shapes import llama

__all__ = ["ARCHITECTURES", "HOSTILE", "RawGguf", "hostile", "write_gguf", "write_llama_shape"]


def write_llama_shape(
    path: str | Path, n_layer: int, n_embd: int, n_ff: int, n_head: int, n_head_kv: int, n_vocab: int,
    type: str = "Q4_0", *, n_expert: int = 0,
) -> Path:  # fmt: skip
    """Write a Llama of these sizes, or a Mixtral. Raises ValueError for shapes that cannot be."""
    return write_shape(path, llama(n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab, n_expert=n_expert), type)
