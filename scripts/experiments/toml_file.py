"""Reading TOML, with Python 3.10 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TomlError(Exception):
    """A file cannot be read, or is no TOML: one sentence."""


def read_toml(path: Path) -> dict[str, Any]:
    """Raises TomlError."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            raise TomlError("reading TOML needs Python 3.11, or the package tomli") from None
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TomlError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TomlError(f"{path} is no TOML: {error}") from None
    return document
