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

    def value(key: str, default: float | None = None) -> float:
        field = reader.fields.get(f"llama.{key}")
        return default if field is None and default is not None else float(field.contents())

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
        n_expert=int(value("expert_count", 0)),
        n_expert_used=int(value("expert_used_count", 0)),
    )
    network = Llama(shape)
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
        if tensor.name.endswith("_exps.weight"):
            weights |= {tensor.name.replace("_exps.", f"_exps.{e}."): matrix for e, matrix in enumerate(weight)}
        else:
            weights[tensor.name] = weight
    network.load_state_dict(weights)
    return network
