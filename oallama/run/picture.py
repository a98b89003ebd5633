"""Pictures of a conversation: a file as a data URL, as OpenAI's API takes it."""

from __future__ import annotations

import base64
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.core.units import MIB

MAX_BYTES = 64 * MIB
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp"}
"""Formats that llama-server decodes, by their first bytes."""


def data_url(path: str) -> str:
    """Raises UsageError for a file that cannot be read, is larger than MAX_BYTES, or is not such a picture."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the picture {path}: {error.strerror or error}") from None
    kind = next((kind for magic, kind in _KINDS.items() if data.startswith(magic)), None)
    if kind is None:
        raise UsageError(f"{path} is not a picture; use {', '.join(_KINDS.values())}")
    if len(data) > MAX_BYTES:
        raise UsageError(f"the picture {path} is larger than {MAX_BYTES // MIB} MiB; scale it down")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
