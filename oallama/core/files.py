"""Files that are only ever replaced whole."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Make or replace a file in one step: a reader sees the old file or the new one. Makes its folder where there is
    none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
