"""Dataclasses as JSON and back, driven by their fields and type hints.

Understood: nested dataclasses, `tuple[T, ...]`, `tuple[A, B]`, `dict[str, T]`, `Literal`, `T | None`, `Any`, bool, int,
float and str. `Annotated` adds checks and says how a field is written (see the names below). A class may name in
`JSON_KEYS` which keys are written, in which order; properties may be among them, and are ignored when read.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


class Mark(Enum):
    """Metadata of an `Annotated` field."""

    NOT_NEGATIVE = "not negative"
    ABOVE_ZERO = "above 0"
    NOT_EMPTY = "not empty"
    BITS_32 = "32 bits"  # of a whole number that goes to llama.cpp as int32_t; others have 64
    PRINTABLE = "printable"  # text in one line, without what steers a terminal
    FLAT = "flat"  # a dataclass whose keys lie beside those of the outer one
    OMIT_DEFAULT = "omit default"  # not written where the value is the field's default
    REQUIRED = "required"  # must be there, though the field has a default


Count = Annotated[int, Mark.NOT_NEGATIVE]
Size = Annotated[int, Mark.ABOVE_ZERO]
Count32 = Annotated[int, Mark.NOT_NEGATIVE, Mark.BITS_32]
Size32 = Annotated[int, Mark.ABOVE_ZERO, Mark.BITS_32]
Line = Annotated[str, Mark.PRINTABLE]
NotNegative = Annotated[float, Mark.NOT_NEGATIVE]
Positive = Annotated[float, Mark.ABOVE_ZERO]


class CodecError(ValueError):
    """A JSON document does not describe the dataclass. The message names the path, the expected and the actual value:
    `profile.cases[3]: seconds must be a number, not 'fast'`."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    hint: Any
    marks: tuple[Any, ...]
    default: Any

    def is_omitted(self, value: object) -> bool:
        return Mark.OMIT_DEFAULT in self.marks and bool(value == self.default)

    @property
    def is_optional(self) -> bool:
        has_default = self.default is not MISSING or type(None) in get_args(self.hint)
        return has_default and Mark.REQUIRED not in self.marks


_FIELDS: dict[type, tuple[_Field, ...]] = {}


def _fields_of(cls: type) -> tuple[_Field, ...]:
    if cls not in _FIELDS:
        hints = get_type_hints(cls, include_extras=True)
        described_fields = []
        for field in fields(cls):
            hint, marks = _split(hints[field.name])
            default = field.default if field.default_factory is MISSING else field.default_factory()
            described_fields.append(_Field(field.name, hint, marks, default))
        _FIELDS[cls] = tuple(described_fields)
    return _FIELDS[cls]


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """(the type itself, metadata of its `Annotated`)."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises CodecError for invalid JSON, for numbers that JSON forbids (NaN, Infinity, 1e999), and
    for more than MOST_NESTED nested lists and objects."""
    try:
        value = json.loads(text, parse_constant=_refused_constant, parse_float=_finite_number)
    except RecursionError:
        raise CodecError("it is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise CodecError(str(error)) from None
    level = [value]
    for _ in range(MOST_NESTED):
        level = [item for outer in level for item in _items(outer) if isinstance(item, (dict, list))]
        if not level:
            return value
    raise CodecError("it is nested too deeply")


MOST_NESTED = 64  # what reads a document recurses once a level


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refused_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large")
    return number


def to_json(record: Any) -> dict[str, Any]:
    """The JSON object of a dataclass: tuples as lists, NaN and infinities as null."""
    document: dict[str, Any] = {}
    omitted = set()
    for field in _fields_of(type(record)):
        value = getattr(record, field.name)
        if field.is_omitted(value):
            omitted.add(field.name)
        elif Mark.FLAT in field.marks:
            document |= to_json(value)
        else:
            document[field.name] = jsonable(value)
    keys = getattr(type(record), "JSON_KEYS", tuple(document))
    properties = {key for key in keys if key not in document and key not in omitted and hasattr(record, key)}
    document |= {key: jsonable(getattr(record, key)) for key in properties}
    return {key: document[key] for key in keys if key in document}


def jsonable(value: Any) -> Any:
    """A value that JSON can represent: dataclasses become objects, NaN and infinities null, keys strings, tuples
    lists."""
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def from_json(cls: type[_T], document: Any, where: str) -> _T:
    """The dataclass of a JSON object. Unknown keys are ignored; a key may be missing if its field has a default or
    may be None. where: name of the document in errors. Raises CodecError."""
    if not isinstance(document, Mapping):
        raise CodecError(f"{where} must be an object, not {_shown(document)}")
    values = {}
    for field in _fields_of(cls):
        if Mark.FLAT in field.marks:
            values[field.name] = from_json(field.hint, document, where)
        elif field.name in document:
            values[field.name] = _value(field.hint, field.marks, document[field.name], where, field.name)
        elif not field.is_optional:
            raise CodecError(f"{where}: {field.name} is missing")
        elif field.default is MISSING:
            values[field.name] = None
    return cls(**values)


def _without_none(hint: Any) -> Any:
    """T of `T | None`; any other hint unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return inner
    return hint


def _shown(value: Any) -> str:
    """A value as an error shows it, shortened."""
    text = reprlib.repr(value) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _name(key: str) -> str:
    """A key as the path in an error shows it."""
    return key if key.isprintable() and len(key) <= 40 else _shown(key)


_KINDS = {str: "a string", int: "a whole number", bool: "true or false"}


def _value(hint: Any, marks: tuple[Any, ...], value: Any, where: str, name: str) -> Any:
    """A field's value. where: path of the object, name: of the field in it."""

    def wrong(what: str) -> CodecError:
        return CodecError(f"{where}: {name} must be {what}, not {_shown(value)}")

    def inside(inner: Any, item: Any, suffix: str) -> Any:
        """The item of a list or a dictionary; `suffix` is its name after the field's."""
        inner, more = _split(inner)
        return _value(inner, more, item, where, name + suffix)

    inner = _without_none(hint)
    if inner is not hint:
        inner, more = _split(inner)
        if value is None:
            return None
        return _value(inner, (*marks, *more), value, where, name)
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return from_json(hint, value, f"{where}.{name}")  # type: ignore[arg-type]
    if origin is Literal:
        if not any(type(value) is type(arg) and value == arg for arg in args):
            raise wrong(f"one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong("a list")
        if Mark.NOT_EMPTY in marks and not value:
            raise wrong("a non-empty list")
        if args[-1] is ...:
            return tuple(inside(args[0], item, f"[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            raise wrong(f"a list of {len(args)} values")
        return tuple(inside(arg, item, f"[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise wrong("an object")
        return {str(key): inside(args[1], item, f".{_name(str(key))}") for key, item in value.items()}
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.float_info.max:
            raise wrong("a number")
    elif not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise wrong(_KINDS[hint])
    elif hint is int and value.bit_length() >= (bits := 32 if Mark.BITS_32 in marks else 64):
        raise wrong(f"a whole number of {bits} bits")
    elif Mark.PRINTABLE in marks and not value.isprintable():
        raise wrong("one line of printable text")
    if Mark.NOT_NEGATIVE in marks and value < 0:
        raise wrong("at least 0")
    if Mark.ABOVE_ZERO in marks and value <= 0:
        raise wrong("above 0")
    return float(value) if hint is float else value
