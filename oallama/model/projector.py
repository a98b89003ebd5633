"""A vision projector, the GGUF of llama.cpp's --mmproj: its memory, from its header alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import CONVERT_AGAIN, GgufFile, quoted
from oallama.model.gguf_header import read_header

ARCH = "clip"
F32_BYTES = 4
MOST = 2**24  # bound of a count in the header: a picture's edge, a width, heads


@dataclass(frozen=True, slots=True)
class Projector:
    """An image encoder and its projector to tokens. edge: of its native square picture, in pixels; n_patches: of that
    picture. n_ff: of a feed-forward network, gate included."""

    path: str
    weight_bytes: int
    edge: int
    n_patches: int
    n_embd: int
    n_ff: int
    n_head: int

    def compute_bytes(self, flash_attn: bool) -> int:
        """Bytes of the buffers for encoding a picture: the picture, and the larger of the feed-forward network's rows
        with four rows as wide as the embedding and attention's scores with five. Larger pictures take more."""
        n = self.n_patches + 1  # the class embedding
        rows = n * (self.n_ff + 4 * self.n_embd)
        if not flash_attn:
            rows = max(rows, n * (n * self.n_head + 5 * self.n_embd))
        return F32_BYTES * (rows + 3 * self.edge**2)

    def n_bytes(self, flash_attn: bool) -> int:
        """Bytes of weights and compute buffers."""
        return self.weight_bytes + self.compute_bytes(flash_attn)


def read_projector(path: str | os.PathLike[str]) -> Projector:
    """Read the header of a vision projector. Raises ModelFileError for any other file."""
    gguf = read_header(os.fspath(path))
    arch = gguf.metadata.get("general.architecture")
    if arch != ARCH:
        what = "has no architecture" if arch is None else f"is a model of architecture {quoted(str(arch))}"
        raise ModelFileError(f"{gguf.path}: this {what}, not a vision projector; name the mmproj-… file")
    if gguf.metadata.get("clip.has_vision_encoder") is not True:
        raise ModelFileError(f"{gguf.path}: this projector has no vision encoder, and others are not supported")
    edge, patch = _count(gguf, "image_size"), _count(gguf, "patch_size")
    if patch > edge:
        message = f"the patches are {patch} pixels wide, more than a picture's edge of {edge}"
        raise gguf.fault("clip.vision.patch_size", message, CONVERT_AGAIN)
    pixels = max(edge**2, _count(gguf, "image_max_pixels", edge**2, MOST**2))
    gated = any(tensor.name.endswith("ffn_gate.weight") for tensor in gguf.tensors)
    return Projector(
        str(Path(gguf.path)),
        sum(tensor.n_bytes for tensor in gguf.tensors),
        max(edge, int(pixels**0.5)),
        pixels // patch**2,
        _count(gguf, "embedding_length"),
        _count(gguf, "feed_forward_length") * (2 if gated else 1),
        _count(gguf, "attention.head_count"),
    )


def _count(gguf: GgufFile, name: str, default: int | None = None, most: int = MOST) -> int:
    key = f"clip.vision.{name}"
    value = gguf.metadata.get(key, default)
    if type(value) is not int or not 0 < value <= most:
        stated = "missing" if value is None else quoted(str(value))
        raise gguf.fault(key, f"{quoted(key)} is {stated}, but must be a number from 1 to {most}", CONVERT_AGAIN)
    return value
