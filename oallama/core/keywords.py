"""Records from a Python program's keywords: unknown names and wrong types are UsageErrors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from oallama.core.errors import UsageError

T = TypeVar("T")

_KINDS: dict[type, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
}


def record_from(record: type[T], values: Mapping[str, Any], what: str) -> T:
    """The record with these fields. what: the caller's term for a field, e.g. "Placer option". Raises UsageError for an
    unknown field, and the record's own errors."""
    check_names(values, [field.name for field in fields(record)], what)  # type: ignore[arg-type]  # a dataclass
    return record(**values)


def check_fields(record: object) -> None:
    """Raises UsageError if a value does not have its field's type."""
    for name, hint in get_type_hints(type(record)).items():
        types = (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
        check_type(name, getattr(record, name), *types)


def check_names(values: Mapping[str, Any], known: list[str], what: str) -> None:
    """Raises UsageError for an unknown name."""
    for name in values:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}; choose from {', '.join(known)}")


def check_type(name: str, value: Any, *types: Any) -> None:
    """Raises UsageError if a value is of none of these types: int, float, str and None; others are not checked."""
    kinds = [_KINDS[type_] for type_ in types if type_ in _KINDS]
    if not kinds or (value is None and type(None) in types):
        return
    if isinstance(value, bool) or not isinstance(value, tuple(kind for kind, _ in kinds)):
        raise UsageError(f"{name} must be {' or '.join(words for _, words in kinds)}, not {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
