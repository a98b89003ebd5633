"""A GGUF as loose parts, each of which may lie: what hostile files are made of. Written byte by byte, by no library."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from make_model import byte_bpe

TYPE_IDS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7, "string": 8,
    "array": 9, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
FORMATS = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "float32": "f", "bool": "B",
    "uint64": "Q", "int64": "q", "float64": "d",
}  # fmt: skip
GGML_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_1": 9, "Q8_K": 15, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28}


def u32(value: int) -> bytes:
    return struct.pack("<I", value & 0xFFFFFFFF)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value & 0xFFFFFFFFFFFFFFFF)


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def scalar(type: str, value: Any) -> bytes:
    """A metadata value with its type in front."""
    payload = string(value) if type == "string" else struct.pack("<" + FORMATS[type], value)
    return u32(TYPE_IDS[type]) + payload


def array(type: str, values: list[Any]) -> bytes:
    """A metadata array with its types and count in front."""
    payload = b"".join(string(v) if type == "string" else struct.pack("<" + FORMATS[type], v) for v in values)
    return u32(TYPE_IDS["array"]) + u32(TYPE_IDS[type]) + u64(len(values)) + payload


@dataclass
class RawTensor:
    """One tensor header and its data; every field is written as it stands."""

    name: bytes
    shape: list[int]
    type_id: int = 0
    data: bytes = b""
    n_dims: int | None = None  # None: the length of shape
    offset: int | None = None  # None: where the data come to lie
    name_length: int | None = None

    def header(self, offset: int) -> bytes:
        n_dims = len(self.shape) if self.n_dims is None else self.n_dims
        length = len(self.name) if self.name_length is None else self.name_length
        shape = b"".join(u64(extent) for extent in self.shape)
        place = offset if self.offset is None else self.offset
        return u64(length) + self.name + u32(n_dims) + shape + u32(self.type_id) + u64(place)


@dataclass
class RawGguf:
    """The parts of a file. `encode` puts them together without a question."""

    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_kv: int | None = None
    metadata: dict[bytes, bytes] = field(default_factory=dict)  # key -> type and payload
    extra_entries: list[bytes] = field(default_factory=list)  # whole records, after the metadata
    tensors: list[RawTensor] = field(default_factory=list)
    alignment: int = 32

    def let(self, **fields: Any) -> None:
        """Assign fields of the file."""
        vars(self).update(fields)

    def set(self, key: str, value: Any, type: str = "uint32") -> None:
        self.metadata[key.encode()] = scalar(type, value)

    def set_array(self, key: str, type: str, values: list[Any]) -> None:
        self.metadata[key.encode()] = array(type, values)

    def set_raw(self, key: bytes, type_and_payload: bytes) -> None:
        self.metadata[key] = type_and_payload

    def drop(self, key: str) -> None:
        del self.metadata[key.encode()]

    def record(self, key: bytes, type_and_payload: bytes) -> None:
        """Add one more metadata record, even a second of the same key."""
        self.extra_entries.append(string(key) + type_and_payload)

    def tensor(self, name: str) -> RawTensor:
        return next(t for t in self.tensors if t.name == name.encode())

    def remove(self, name: str) -> None:
        self.tensors.remove(self.tensor(name))

    def change(self, tensor_name: str, **fields: Any) -> None:
        """Assign fields of one tensor."""
        vars(self.tensor(tensor_name)).update(fields)

    def retype(self, tensor_name: str, type_name: str, bytes_per_element: float) -> None:
        """Give a tensor another ggml type, with as many zero bytes of data as that takes."""
        tensor = self.tensor(tensor_name)
        n = 1
        for extent in tensor.shape:
            n *= extent
        tensor.type_id, tensor.data = GGML_IDS[type_name], bytes(int(n * bytes_per_element))

    def reshape(self, tensor_name: str, *shape: int) -> None:
        """Give a tensor another shape, with zero data to match."""
        self.change(tensor_name, shape=list(shape))
        self.retype(tensor_name, "F32", 4)

    def pad(self, data: bytes) -> bytes:
        return data + bytes(-len(data) % self.alignment)

    def head(self) -> bytes:
        """Everything before the tensor data, padded."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_kv = len(self.metadata) + len(self.extra_entries) if self.n_kv is None else self.n_kv
        parts = [self.magic, u32(self.version), u64(n_tensors), u64(n_kv)]
        parts += [string(key) + value for key, value in self.metadata.items()]
        parts += self.extra_entries
        offset = 0
        for tensor in self.tensors:
            parts.append(tensor.header(offset))
            offset += len(self.pad(tensor.data))
        return self.pad(b"".join(parts))

    def encode(self) -> bytes:
        return self.head() + b"".join(self.pad(tensor.data) for tensor in self.tensors)


def tiny_llama(n_embd: int = 64, n_ff: int = 64, n_head: int = 2, n_vocab: int = 264) -> RawGguf:
    """A valid one-layer llama of 64-wide F32 zeros, which stock llama.cpp loads and decodes."""
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
    g.set_array("tokenizer.ggml.tokens", "string", vocabulary["tokens"])
    g.set_array("tokenizer.ggml.token_type", "int32", vocabulary["types"])
    g.set_array("tokenizer.ggml.merges", "string", vocabulary["merges"])
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
        n = 1
        for extent in shape:
            n *= extent
        g.tensors.append(RawTensor(f"{name}.weight".encode(), list(shape), 0, bytes(4 * n)))
    return g
