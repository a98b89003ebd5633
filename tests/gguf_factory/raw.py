"""A GGUF as loose parts, each of which may lie: what hostile files are made of. Written byte by byte, by no library."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from oallama.core.ggml_types import GGML_TYPES, GGML_TYPES_BY_NAME
from oallama.model.shape_file import byte_bpe

TYPES = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7, "string": 8,
    "array": 9, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
LETTERS = {id: letter for id, letter in enumerate("BbHhIifB--Qqd") if letter != "-"}  # struct's
MOST_BYTES = 1 << 40  # of a tensor's data


def packed(letter: str, value: Any) -> bytes:
    """The value as this letter of struct; the low bytes of one that does not fit, zeros of one that is no number."""
    try:
        return struct.pack(f"<{letter}", value)
    except (struct.error, OverflowError):
        width = struct.calcsize(letter)
    try:
        return (int(value) % (1 << 8 * width)).to_bytes(width, "little")
    except (TypeError, ValueError, OverflowError):
        return bytes(width)


def u32(value: Any) -> bytes:
    return packed("I", value)


def u64(value: Any) -> bytes:
    return packed("Q", value)


def string(value: Any) -> bytes:
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return u64(len(raw)) + raw


def typed(type: int, value: Any) -> bytes:
    """A value of metadata with its type in front; a list as an array of that type."""
    values = value if isinstance(value, list) else [value]
    payload = b"".join(string(v) if type == TYPES["string"] else packed(LETTERS.get(type, "I"), v) for v in values)
    head = u32(TYPES["array"]) + u32(type) + u64(len(values)) if isinstance(value, list) else u32(type)
    return head + payload


@dataclass
class RawTensor:
    """A tensor's header, each field written as it stands, before data of zeros. None: what is true of it."""

    name: Any
    shape: list[Any]
    type: Any = 0
    n_dims: Any = None
    offset: Any = None
    name_length: Any = None

    @property
    def n_bytes(self) -> int:
        """What its shape and type take, if that is not too much."""
        kind = GGML_TYPES.get(self.type) if isinstance(self.type, int) else None
        if kind is None or not all(isinstance(extent, int) and extent >= 0 for extent in self.shape):
            return 0
        n_bytes = kind.n_bytes(prod(self.shape))
        return n_bytes if n_bytes <= MOST_BYTES else 0

    def header(self, offset: int) -> bytes:
        name = string(self.name)[8:]
        length = len(name) if self.name_length is None else self.name_length
        n_dims = len(self.shape) if self.n_dims is None else self.n_dims
        shape = b"".join(map(u64, self.shape))
        place = offset if self.offset is None else self.offset
        return u64(length) + name + u32(n_dims) + shape + u32(self.type) + u64(place)


@dataclass
class RawGguf:
    """The parts of a file. metadata: (type, value) by key, or a value's bytes; more: records behind these."""

    magic: bytes = b"GGUF"
    version: Any = 3
    n_tensors: Any = None
    n_kv: Any = None
    alignment: int = 32
    metadata: dict[Any, Any] = field(default_factory=dict)
    more: list[bytes] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)

    def set(self, key: str, value: Any, type: str = "uint32") -> None:
        self.metadata[key] = (TYPES[type], value)

    def add(self, name: str, *shape: int, type: str = "F32") -> None:
        self.tensors.append(RawTensor(name, list(shape), GGML_TYPES_BY_NAME[type].id))

    def tensor(self, name: str) -> RawTensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def head(self) -> bytes:
        """Everything before the tensor data, padded."""
        records = [string(key) + (value if isinstance(value, bytes) else typed(*value))
                   for key, value in self.metadata.items()] + self.more  # fmt: skip
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(records) if self.n_kv is None else self.n_kv
        headers, offset = [], 0
        for tensor in self.tensors:
            headers.append(tensor.header(offset))
            offset += self.padded(tensor.n_bytes)
        head = b"".join([self.magic, u32(self.version), u64(n_tensors), u64(n_kv), *records, *headers])
        return head + bytes(self.padded(len(head)) - len(head))

    def padded(self, n_bytes: int) -> int:
        return -(-n_bytes // self.alignment) * self.alignment

    @property
    def data_bytes(self) -> int:
        return sum(self.padded(tensor.n_bytes) for tensor in self.tensors)

    def encode(self) -> bytes:
        return self.head() + bytes(self.data_bytes)

    def write(self, path: Path) -> Path:
        """Write it with a hole in the place of its data."""
        path.write_bytes(head := self.head())
        os.truncate(path, len(head) + self.data_bytes)
        return path


def tiny_llama(n_embd: int = 64, n_ff: int = 64, n_head: int = 2, n_vocab: int = 264) -> RawGguf:
    """A valid one-layer llama of F32 zeros, which stock llama.cpp loads and decodes."""
    g = RawGguf()
    g.set("general.architecture", "llama", "string")
    counts = {"context_length": 64, "embedding_length": n_embd, "block_count": 1, "feed_forward_length": n_ff}
    heads = {"attention.head_count": n_head, "attention.head_count_kv": 1, "rope.dimension_count": n_embd // n_head}
    for key, value in {**counts, **heads, "vocab_size": n_vocab}.items():
        g.set(f"llama.{key}", value)
    g.set("llama.attention.layer_norm_rms_epsilon", 1e-5, "float32")
    g.set("llama.rope.freq_base", 10000.0, "float32")
    vocabulary = byte_bpe(n_vocab)
    g.set("tokenizer.ggml.model", "gpt2", "string")
    g.set("tokenizer.ggml.pre", "gpt-2", "string")
    g.set("tokenizer.ggml.tokens", vocabulary["tokens"], "string")
    g.set("tokenizer.ggml.token_type", vocabulary["types"], "int32")
    g.set("tokenizer.ggml.merges", vocabulary["merges"], "string")
    g.set("tokenizer.ggml.bos_token_id", 0)
    g.set("tokenizer.ggml.eos_token_id", 1)
    n_kv = n_embd // n_head
    shapes = {
        "token_embd": (n_embd, n_vocab), "output_norm": (n_embd,), "output": (n_embd, n_vocab),
        "blk.0.attn_norm": (n_embd,), "blk.0.attn_q": (n_embd, n_embd), "blk.0.attn_k": (n_embd, n_kv),
        "blk.0.attn_v": (n_embd, n_kv), "blk.0.attn_output": (n_embd, n_embd), "blk.0.ffn_norm": (n_embd,),
        "blk.0.ffn_gate": (n_embd, n_ff), "blk.0.ffn_up": (n_embd, n_ff), "blk.0.ffn_down": (n_ff, n_embd),
    }  # fmt: skip
    for name, shape in shapes.items():
        g.add(f"{name}.weight", *shape)
    return g
