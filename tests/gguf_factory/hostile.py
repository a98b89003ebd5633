"""The hostile corpus: files made by hand that stock llama.cpp refuses, dies on or hangs on, and what ours must say."""

from __future__ import annotations

from pathlib import Path

from gguf_factory import hostile_container, hostile_files, hostile_model
from gguf_factory.raw import tiny_llama

_CASES = {**hostile_container.CASES, **hostile_model.CASES}

HOSTILE: dict[str, str] = {kind: phrase for kind, (phrase, _) in _CASES.items()} | {
    kind: phrase for kind, (phrase, _) in hostile_files.CASES.items()
}
"""Every kind of hostile file, and a phrase that our ModelFileError about it must hold."""


def hostile(path: str | Path, kind: str) -> Path:
    """Write the hostile file of this kind to `path` (or beside it) and return the one to open."""
    path = Path(path)
    if kind in hostile_files.CASES:
        return hostile_files.CASES[kind][1](path)
    gguf = tiny_llama()
    made = _CASES[kind][1](gguf)
    path.write_bytes(made if isinstance(made, bytes) else gguf.encode())
    return path
