"""GGUF files: sound models of several architectures as trees, changed, written, and read."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from gguf_factory import write_gguf
from gguf_factory.hostile import parted
from gguf_factory.raw import TYPES, RawGguf, RawTensor, string, tiny_llama, typed

from fuzz.mutation import changed, damaged, number
from oallama.model.cut import cut_axis, cut_extent, cut_granularity
from oallama.model.gguf_header import read_header
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
from oallama.report.inspect import inspect_document, model_lines, operator_table

SPLIT = b"\n-- next part of a split model --\n"
HOLE = b"\n-- then so many zeros: "
"""Between the parts of one input, and before the number of zeros that a part ends with: its tensors' data."""

ARCHITECTURES = ("gpt2", "phi3", "qwen3moe", "deepseek2", "gemma2", "mamba2", "minicpm3", "lfm2", "falcon", "olmo2")
MOST_BYTES = 1 << 31  # of data that grow with a shape; nothing is ever written of them


@functools.cache
def sound() -> tuple[list[dict[str, Any]], ...]:
    """The models that inputs are made of, in parts."""
    small, bare, split = (tiny_llama(n_embd=32, n_ff=32, n_head=1) for _ in range(3))
    for key in ("expert_group_count", "expert_group_used_count", "nextn_predict_layers", "leading_dense_block_count"):
        small.set(f"llama.{key}", 0)
    small.set("llama.rope.scaling.type", "linear", "string")
    small.set("general.alignment", 32)
    small.set("tokenizer.ggml.padding_token_id", 2)
    small.set("tokenizer.ggml.scores", [0.0] * 264, "float32")
    bare.metadata = {key: value for key, value in bare.metadata.items() if not key.startswith("tokenizer.")}
    bare.set("tokenizer.ggml.model", "none", "string")
    with tempfile.TemporaryDirectory() as folder:
        others = [read(write_gguf(Path(folder) / f"{arch}.gguf", arch)) for arch in ARCHITECTURES]
    models = [[bare], [bare], [bare], [small], [small], parted(split), *([other] for other in others)]
    return tuple([tree_of(part) for part in parts] for parts in models)


def read(path: Path) -> RawGguf:
    """A sound file as loose parts."""
    header, made = read_header(str(path)), RawGguf()
    for key, entry in header.entries.items():
        value, type = entry.value, entry.type.removeprefix("array[").removesuffix("]")
        if type != entry.type:
            value = list(value.raw_strings() if type == "string" else value)
        made.set(key, value, type)
    for tensor in header.tensors:
        made.add(tensor.name, *tensor.shape, type=tensor.type)
    return made


def tree_of(part: RawGguf) -> dict[str, Any]:
    """Its keys without the architecture's name, so that they follow where that changes."""
    _, arch = part.metadata.get("general.architecture", (0, "-"))
    return {
        "metadata": [
            {"key": key.removeprefix(arch), "type": type, "value": value}
            for key, (type, value) in part.metadata.items()
        ],
        "tensors": [{"name": t.name, "type": t.type, "shape": t.shape, "offset": None} for t in part.tensors],
    }


def part_of(tree: Any) -> RawGguf:
    """The part that a tree describes, whatever has become of that."""
    part = RawGguf()
    rows = rows_of(tree, "metadata", "key", "type")
    arch = next((row.get("value") for row in rows if row["key"] == "general.architecture"), "-")
    for row in rows:
        key, type, value = row["key"], row["type"], row.get("value")
        name = f"{arch}{key}" if isinstance(key, str) and key.startswith(".") else key
        part.more.append(string(name) + typed(type if isinstance(type, int) else TYPES["uint32"], value))
        if key == "general.alignment" and value in (64, 4096):
            part.alignment = value
    for row in rows_of(tree, "tensors", "name", "shape"):
        shape = row["shape"] if isinstance(row["shape"], list) else [row["shape"]]
        part.tensors.append(RawTensor(row["name"], shape, row.get("type", 0), offset=row.get("offset")))
    return part


def rows_of(tree: Any, part: str, *needed: str) -> list[dict[str, Any]]:
    rows = tree.get(part) if isinstance(tree, dict) else None
    return [row for row in rows if isinstance(row, dict) and row.keys() >= {*needed}] if isinstance(rows, list) else []


def make(random: Random) -> bytes:
    """One input: a file, or the parts of a split model with SPLIT between them."""
    parts = [part_of(tree) for tree in changed(random, sound())]
    if parts and random.random() < 0.1:
        setattr(parts[0], random.choice(("version", "n_tensors", "n_kv")), number(random, len(parts[0].tensors)))
    files = [(part.head(), part.data_bytes) for part in parts if part.data_bytes <= MOST_BYTES]
    if random.random() < 0.2:
        files = [(damaged(random, head), random.choice((n_zeros, n_zeros, n_zeros // 2))) for head, n_zeros in files]
    return encoded(files)


def encoded(files: list[tuple[bytes, int]]) -> bytes:
    """One input of files, each a head and the number of zeros behind it."""
    return SPLIT.join(head + HOLE + b"%d" % n_zeros for head, n_zeros in files)


def check(raw: bytes, folder: Path) -> None:
    """Read it and everything that follows from it: operators, where they may be cut, the report of `inspect`."""
    parts = raw.split(SPLIT)
    paths = []
    for i, part in enumerate(parts):
        path = folder / (f"m-{i + 1:05d}-of-{len(parts):05d}.gguf" if len(parts) > 1 else "m.gguf")
        head, hole, n_zeros = part.rpartition(HOLE)
        path.write_bytes(head if hole else part)
        if hole:
            os.truncate(path, len(head) + int(n_zeros))
        paths.append(path)
    found = read_gguf(paths[0])
    model, ops = model_info(found), operators(found)
    for operator in ops:
        assert cut_extent(operator) >= 1 and cut_granularity(operator) >= 1, f"{cut_axis(operator)} of {operator}"
        assert 0 < operator.active_fraction <= 1, f"{operator} is active in {operator.active_fraction}"
        assert operator.mul_mat.bytes == operator.bytes, f"{operator} is {operator.mul_mat.bytes} bytes"
    inspect_document(model, ops)
    model_lines(model)
    operator_table(ops)
