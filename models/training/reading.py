"""Tokenizer and network back from a GGUF file of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .network import Llama


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer stored in the file."""
    reader = gguf.GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    marks = tuple(t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL)
    return Tokenizer(tokens, merges, marks)


def load_network(path: Path) -> Llama:
    """The network in F32 with the file's weights (dequantised where they are quantised). Needs torch."""
    import torch

    from .network import Llama, Shape

    reader = gguf.GGUFReader(path)

    def value(key: str) -> float:
        return float(reader.fields[f"llama.{key}"].contents())

    shape = Shape(
        n_vocab=int(value("vocab_size")),
        n_ctx=int(value("context_length")),
        n_embd=int(value("embedding_length")),
        n_layer=int(value("block_count")),
        n_ff=int(value("feed_forward_length")),
        n_head=int(value("attention.head_count")),
        n_head_kv=int(value("attention.head_count_kv")),
        norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_base=value("rope.freq_base"),
    )
    network = Llama(shape)
    weights = {
        t.name: torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32))
        for t in reader.tensors
    }
    network.load_state_dict(weights)
    return network
