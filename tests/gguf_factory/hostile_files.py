"""Hostile things that are more than one file's bytes: split models that do not fit, sparse giants, no files at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gguf_factory.raw import RawGguf, RawTensor, string, tiny_llama, u32, u64


def _missing(path: Path) -> Path:
    return path.with_name("absent.gguf")


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _dangling_link(path: Path) -> Path:
    path.symlink_to(path.with_name("nowhere"))
    return path


def _giant_string(path: Path) -> Path:
    """A 2 GiB string in a file that is large enough for it, most of it a hole."""
    g = tiny_llama()
    g.metadata.clear()
    g.set_raw(b"comment", u32(8) + u64(2**31))
    path.write_bytes(g.encode())
    os.truncate(path, 2**32)
    return path


def _giant_array(path: Path) -> Path:
    """2^28 empty strings, again in a hole."""
    g = tiny_llama()
    g.metadata.clear()
    g.set_raw(b"comments", u32(9) + u32(8) + u64(2**28))
    path.write_bytes(g.encode())
    os.truncate(path, 2**32)
    return path


def _many(**counts: int) -> Callable[[Path], Path]:
    """More tensors or keys than a model has, in a file that is large enough for them, most of it a hole."""

    def make(path: Path) -> Path:
        g = tiny_llama()
        g.let(**counts)
        path.write_bytes(g.encode())
        os.truncate(path, 2**32)
        return path

    return make


def _zeros(path: Path) -> Path:
    path.touch()
    os.truncate(path, 2**32)
    return path


def _split(path: Path, change: Callable[[list[RawGguf]], None], named: str = "model-{:05d}-of-00002.gguf") -> Path:
    """tiny_llama in two parts, after `change` had its way with them; returns the first."""
    whole = tiny_llama()
    second = RawGguf(tensors=whole.tensors[6:])
    whole.tensors = whole.tensors[:6]
    parts = [whole, second]
    for i, part in enumerate(parts):
        part.set("split.no", i, "uint16")
        part.set("split.count", 2, "uint16")
        part.set("split.tensors.count", 12, "int32")
    change(parts)
    files = [path.with_name(named.format(i + 1)) for i in range(2)]
    for part, file in zip(parts, files, strict=True):
        if part.tensors or part.metadata:
            file.write_bytes(part.encode())
    return files[0]


def split_llama(path: Path) -> Path:
    """The valid model that the split cases are made of."""
    return _split(path, lambda parts: None)


def _double_tensor(parts: list[RawGguf]) -> None:
    parts[1].tensors.append(RawTensor(b"token_embd.weight", [64, 264], 0, bytes(4 * 64 * 264)))
    for part in parts:
        part.set("split.tensors.count", 13, "int32")


CASES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "no such file": ("there is no such file", _missing),
    "directory": ("this is a directory", _directory),
    "named pipe": ("this is not a regular file", _pipe),
    "dangling link": ("there is no such file", _dangling_link),
    "4 GiB of zeros": ("not a GGUF file", _zeros),
    "string of 2 GiB": ("goes beyond the first 256 MiB", _giant_string),
    "array of 2^28 strings": ("more than any real model has", _giant_array),
    "2^20 tensors": ("1048576 tensors are claimed, more than any real model has", _many(n_tensors=2**20)),
    "2^24 keys": ("16777216 metadata keys are claimed, more than any real model has", _many(n_kv=2**24)),
    "part missing": ("model-00002-of-00002.gguf of this split", lambda p: _split(p, lambda s: s[1].__init__())),  # type: ignore[misc]
    "part not named like one": (
        "is not named like one",
        lambda p: _split(p, lambda s: None, "part{}.gguf"),
    ),
    "part count above the name": (
        "is not named like one",
        lambda p: _split(p, lambda s: s[0].set("split.count", 65535, "uint16")),
    ),
    "part of another number of blocks": (
        "'llama.block_count' is '2' in this part, '1' in the first one",
        lambda p: _split(p, lambda s: s[1].set("llama.block_count", 2)),
    ),
    "part count as uint32": ("split.count is a uint32", lambda p: _split(p, lambda s: s[0].set("split.count", 2))),
    "parts in the wrong order": (
        "split.no is 1 where 0 belongs",
        lambda p: _split(p, lambda s: s[0].set("split.no", 1, "uint16")),
    ),
    "part of another split": (
        "split.count is 3 where 2 belongs",
        lambda p: _split(p, lambda s: s[1].set("split.count", 3, "uint16")),
    ),
    "part without a number": ("split.no is missing", lambda p: _split(p, lambda s: s[1].drop("split.no"))),
    "part of another architecture": (
        "this part is of architecture 'gpt2'",
        lambda p: _split(p, lambda s: s[1].set("general.architecture", "gpt2", "string")),
    ),
    "parts with fewer tensors": (
        "states 99 tensors but the parts hold 12",
        lambda p: _split(p, lambda s: s[0].set("split.tensors.count", 99, "int32")),
    ),
    "tensor in two parts": ("is in an earlier part too", lambda p: _split(p, _double_tensor)),
    "second part no GGUF": (
        "model-00002-of-00002.gguf: this is not a GGUF file",
        lambda p: _split(p, lambda s: s[1].let(magic=b"GGUX")),
    ),
    "second part cut": (
        "more than the file has left",
        lambda p: _split(p, lambda s: s[1].record(b"x", u32(8) + u64(9**9) + string("x"))),
    ),
}
