"""A LoRA adapter, the GGUF that llama.cpp takes with --lora: which weights it changes, and its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from oallama.core.errors import ModelFileError
from oallama.model.gguf_header import read_header

_SUFFIXES = (".lora_a", ".lora_b")
_PADDING = 512  # most padding of a tensor in a device's buffer, bytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """n_bytes: of both matrices, by the weight that they change. llama.cpp stores them beside that weight."""

    path: str
    n_bytes: dict[str, int]

    def device_bytes(self, on_device: Iterable[str]) -> int:
        """Bytes on the device for weights that are there whole. The matrices of a split weight are on the host."""
        return sum(self.n_bytes.get(name, 0) for name in on_device)


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read the header of a LoRA adapter. Raises ModelFileError for any other file."""
    gguf = read_header(os.fspath(path))
    if [gguf.metadata.get(key) for key in ("general.type", "adapter.type")] != ["adapter", "lora"]:
        raise ModelFileError(f"{gguf.path}: not a LoRA adapter; convert it with llama.cpp's convert_lora_to_gguf.py")
    n_bytes: dict[str, int] = {}
    for tensor in gguf.tensors:
        weight = next((tensor.name.removesuffix(end) for end in _SUFFIXES if tensor.name.endswith(end)), None)
        if weight is not None:
            n_bytes[weight] = n_bytes.get(weight, 0) + tensor.n_bytes + _PADDING
    if not n_bytes:
        raise ModelFileError(f"{gguf.path}: the LoRA adapter changes no weight")
    return Adapter(gguf.path, n_bytes)
