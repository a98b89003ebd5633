"""RoPE: the layers in which llama.cpp rotates Q and K."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.model.gguf_file import GgufFile
from oallama.model.hyperparameters import number

# By name, as llama.cpp decides it: files state a width of rotation where nothing is rotated, and none where all is.
# tests/golden/test_operator_graphs.py compares with its graphs.
_NEVER = frozenset({"bloom", "gpt2", "jais", "jamba", "mpt", "nemotron_h", "nemotron_h_moe", "refact", "starcoder"})
_IF_FINETUNED = frozenset({"granite", "granitehybrid", "graniteswitch"})
_BY_LAYER = {
    "cohere2": "attention.sliding_window_pattern",
    "cohere2moe": "attention.sliding_window_pattern",
    "granite_swa": "attention.rope_pattern",
}
_EXCEPT = {"cohere2": 3, "cohere2moe": 0, "llama4": 3, "smallthinker": 0, "smollm3": 3}
"""Which one of four layers is not rotated, if the file does not say otherwise."""


def rotates(gguf: GgufFile, layer: int) -> bool:
    """Whether Q and K of a layer are rotated before attention."""
    arch = gguf.arch
    if arch in _NEVER or (arch == "baichuan" and number(gguf, "block_count") != 32):  # its 13B has 40
        return False
    if arch in _IF_FINETUNED:
        return gguf.metadata.get(f"{arch}.rope.scaling.finetuned") is not False
    if arch == "cohere2moe" and layer < number(gguf, "leading_dense_block_count"):
        return True
    pattern = gguf.metadata.get(f"{arch}.{_BY_LAYER.get(arch)}")
    if isinstance(pattern, Sequence) and layer < len(pattern):
        return bool(pattern[layer])
    slides = number(gguf, "attention.sliding_window", 0 if arch == "smallthinker" else 1) > 0
    return not (slides and layer % 4 == _EXCEPT.get(arch))
