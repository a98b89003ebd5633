"""Writes the GGUF files the tests need: tiny valid models of many architectures, and hostile ones.

write_gguf(path, "qwen3moe", weight_type="Q4_0")      # loads and decodes in stock llama.cpp
write_llama_shape(path, n_layer=16, ...)              # any size, written fast (scripts/make_model.py)
hostile(path, "tensor data overlap")                  # one of HOSTILE, which maps each kind to the phrase expected
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from make_model import random_blocks, write_llama_shape

from gguf_factory.hostile import HOSTILE, hostile
from gguf_factory.raw import RawGguf
from gguf_factory.write import ARCHITECTURES, write_gguf

__all__ = [
    "ARCHITECTURES",
    "HOSTILE",
    "RawGguf",
    "hostile",
    "random_blocks",
    "write_gguf",
    "write_llama_shape",
]
