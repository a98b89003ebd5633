"""A GGUF of a shape: header, vocabulary and tensor infos; for programs that read only headers, with a hole (sparse
file) in place of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.model.shapes import ModelShape, Ne

ROUTER = "ffn_gate_inp"
_OF_THE_FFN = ("ffn_", "exp_probs_b")
"""Roles that another FFN replaces; every layer keeps ffn_norm."""

Tensor = tuple[str, Ne, str]
"""Name, ne and ggml type."""


def write_empty(path: Path, shape: ModelShape, type: str, name: str) -> Path:
    """Write a file without weights, which takes a few MB of the disk, and return its path. Raises ValueError for rows
    that the type cannot hold, KeyError for an unknown type, OSError."""
    writer = begin(path, shape, type, name)
    writer.close()
    sizes = (n_bytes(ne, kind) for _, ne, kind in tensors(shape, type))
    with path.open("r+b") as file:
        end = writer.ggml_pad(file.seek(0, 2), writer.data_alignment)
        file.truncate(end + sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes))
    return path


def begin(path: Path, shape: ModelShape, type: str, name: str) -> gguf.GGUFWriter:
    """Write all but the tensors' data, whose order is that of tensors(). Raises as write_empty."""
    block_size = GGML_TYPES_BY_NAME[type].block_size
    odd = [tensor for tensor, ne, kind in tensors(shape, type) if kind == type and ne[0] % block_size]
    if odd:
        raise ValueError(f"rows of {odd[0]} must be a multiple of {block_size} for {type}")
    writer = gguf.GGUFWriter(str(path), shape.arch)
    writer.add_name(name)
    _add_sizes(writer, shape)
    add_byte_bpe(writer, shape.n_vocab)
    for tensor, ne, kind in tensors(shape, type):
        if kind == "F32":
            writer.add_tensor_info(tensor, ne[::-1], np.dtype(np.float32), n_bytes(ne, kind))
        else:
            rows = (*ne[:0:-1], n_bytes((ne[0],), kind))  # of bytes
            writer.add_tensor_info(tensor, rows, np.dtype(np.uint8), n_bytes(ne, kind), gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def tensors(shape: ModelShape, type: str) -> Iterator[Tensor]:
    """The tensors in file order. Matrices are of `type`; the router and all vectors are F32."""
    embedding = (shape.n_embd, shape.n_vocab)
    yield "token_embd.weight", embedding, type
    for name, n in shape.factors.items():
        yield f"{name}.weight", (n,), "F32"
    layer, dense = [*_layer(shape, shape.matrices, type)], []
    if shape.n_dense:
        others = [tensor for tensor in layer if not _of_the_ffn(tensor[0])]
        dense = others + [(f"{role}.weight", ne, type) for role, ne in shape.dense.items()]
    for i in range(shape.n_layer):
        for name, ne, kind in dense if i < shape.n_dense else layer:
            yield f"blk.{i}.{name}", ne, kind
    for role, ne in shape.mtp.items():
        yield f"blk.{shape.n_layer - 1}.{role}.weight", ne, type if len(ne) > 1 else "F32"
    yield "output_norm.weight", (shape.n_embd,), "F32"
    if not shape.tied:
        yield "output.weight", embedding, type
    for role, n in shape.last_biases.items():
        yield f"{role}.bias", (n,), "F32"


def n_bytes(ne: Ne, type: str) -> int:
    return GGML_TYPES_BY_NAME[type].n_bytes(prod(ne))


def _layer(shape: ModelShape, matrices: dict[str, Ne], type: str) -> Iterator[Tensor]:
    for role, ne in matrices.items():
        yield f"{role}.weight", ne, "F32" if role == ROUTER else type
    for role, n in shape.vectors.items():
        yield f"{role}.weight", (n,), "F32"
    for role, of in shape.biases.items():
        yield f"{role}.bias", (of,) if isinstance(of, int) else of, "F32"


def _of_the_ffn(name: str) -> bool:
    return name.startswith(_OF_THE_FFN) and name != "ffn_norm.weight"


ADD = {
    float: gguf.GGUFWriter.add_float32, int: gguf.GGUFWriter.add_uint32, str: gguf.GGUFWriter.add_string,
    bool: gguf.GGUFWriter.add_bool, list: gguf.GGUFWriter.add_array,
}  # fmt: skip
"""The method that writes a metadata value, by its Python type."""


def _add_sizes(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)
    for key, value in shape.metadata.items():
        ADD[type(value)](writer, f"{shape.arch}.{key}", value)


def byte_bpe(n_vocab: int) -> dict[str, list[Any]]:
    """A byte-level BPE vocabulary (GPT-2's) of n_vocab >= 264 tokens: 3 special, 256 bytes, 5 merges, then fillers."""
    if n_vocab < 264:
        raise ValueError(f"a byte-level vocabulary needs at least 264 tokens, not {n_vocab}")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    char = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = ["<|begin|>", "<|end_of_text|>", "<|pad|>", *(char[byte] for byte in range(256))]
    types = [3, 3, 3, *([1] * 256)]  # 3: control, 1: normal
    space = char[0x20]
    merges = ["t h", "th e", f"{space} t", f"{space} a", "e r"]
    tokens += ["".join(merge.split(" ")) for merge in merges]
    types += [1] * len(merges)
    fillers = n_vocab - len(tokens)
    tokens += [f"<|filler_{i}|>" for i in range(fillers)]
    return {"tokens": tokens, "types": types + [5] * fillers, "merges": merges}  # 5: unused


def add_byte_bpe(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Store byte_bpe(n_vocab) in the file as its tokenizer."""
    vocabulary = byte_bpe(n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)
