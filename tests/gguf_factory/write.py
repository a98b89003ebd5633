"""Writes the models of architectures.py with gguf's own writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from make_model import add_byte_bpe, random_blocks

from gguf_factory.architectures import ARCHITECTURES
from gguf_factory.parts import Kind, Sizes

__all__ = ["ARCHITECTURES", "write_gguf"]


def write_gguf(
    path: str | Path,
    arch: str,
    *,
    weight_type: str = "F16",
    metadata: dict[str, Any] | None = None,
    chat_template: str | None = None,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] = add_byte_bpe,
    split_max_tensors: int = 0,
    seed: int = 0,
    **sizes: int,
) -> Path:
    """Write a tiny random model of ARCHITECTURES[arch] to `path` and return the file to load.

    weight_type: ggml type of the matrices (F16 where rows do not fit its blocks). metadata: keys to add, replace, or
    (None) leave out. tokenizer: stores a vocabulary of so many tokens. split_max_tensors: tensors per part of a split
    file, 0 for one file. sizes: fields of Sizes.
    """
    model = ARCHITECTURES[arch](replace(Sizes(), **sizes))
    model.metadata |= metadata or {}
    writer = gguf.GGUFWriter(str(path), model.arch, split_max_tensors=split_max_tensors)
    writer.add_name("tiny random model")  # llama.cpp demands certain tokens of what is called phi-3
    for key, value in model.metadata.items():
        _add(writer, key, value)
    tokenizer(writer, model.sizes.n_vocab)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    rng = np.random.default_rng(seed)
    for name, shape, kind in model.tensors:
        data, raw = _tensor(name, shape, kind, weight_type, rng)
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not split_max_tensors:
        return Path(path)
    n_parts = -(-len(model.tensors) // split_max_tensors)
    return Path(path).with_name(f"{Path(path).stem}-00001-of-{n_parts:05d}.gguf")


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add one key with the GGUF type llama.cpp reads it as."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensor(
    name: str, shape: tuple[int, ...], kind: Kind, weight_type: str, rng: np.random.Generator
) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType | None]:
    """Data of one tensor, numpy order (ne reversed), and the ggml type of raw bytes."""
    rows = tuple(reversed(shape))
    if kind == "norm":
        return np.ones(rows, np.float32) + 0.1 * rng.standard_normal(rows, np.float32), None
    if kind == "bias":
        return 0.01 * rng.standard_normal(rows, np.float32), None
    if kind == "state":
        values = 0.5 * rng.standard_normal(rows, np.float32)
        return (-np.abs(values) if name.endswith("ssm_a") else values), None
    wanted = gguf.GGMLQuantizationType[weight_type]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[wanted]
    if shape[0] % block_size:
        return (rng.standard_normal(rows, np.float32) * shape[0] ** -0.5).astype(np.float16), None
    if weight_type in ("F32", "F16"):
        values = (rng.standard_normal(rows, np.float32) * np.float32(shape[0] ** -0.5)).astype(np.float32)
        return (values if weight_type == "F32" else values.astype(np.float16)), None
    n_blocks = int(np.prod(shape)) // block_size
    blocks = random_blocks(weight_type, n_blocks, shape[0] ** -0.5, rng)
    return blocks.reshape(*rows[:-1], shape[0] // block_size * block_bytes), wanted
