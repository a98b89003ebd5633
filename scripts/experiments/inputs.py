"""Inputs of experiments: TOML files, and their tables as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class InputError(Exception):
    """A file, or what it says, cannot be used: one sentence."""


def read_toml(path: Path) -> dict[str, Any]:
    """With Python 3.10 too. Raises InputError."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            raise InputError("reading TOML needs Python 3.11, or the package tomli") from None
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from None
    return document


def record(cls: type[T], table: Any, where: str) -> T:
    """The dataclass of a table. Raises InputError for a key that is not known, is missing, or has the wrong type."""
    from oallama.core.codec import CodecError, from_json  # scripts/gpu_run begins without it

    known = sorted(field.name for field in fields(cls))  # type: ignore[arg-type]
    for key in table if isinstance(table, Mapping) else ():
        if key not in known:
            raise InputError(f"{where} has an unknown key {key}; known are {', '.join(known)}")
    try:
        return from_json(cls, table, where)
    except CodecError as error:
        raise InputError(str(error)) from None
