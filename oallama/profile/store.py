"""A profile as JSON, and back.

History of the format
  1  cases, rest, link, boundary, contention, launch_s, skipped, warnings; every case with its raw samples. Since
     0.1 (2026-11-21) rest has the same batch and depth with and without flash attention, and type_k and type_v, which
     are left out where they are f16; link also has issue_pinned and issue_pageable; sharing, copy_wait and
     launch_issue_s are left out where nothing of them was measured.

A reader knows the versions it names and refuses the others: measuring again costs a minute, a wrong number costs more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_args

from oallama.core.errors import ProfileError
from oallama.core.types import (
    Contention,
    LinearFit,
    Profile,
    ProfileCase,
    RestCase,
    RestShape,
    Shape,
    Sharing,
    SkippedCase,
    Worker,
)

VERSION = 1
READABLE_VERSIONS = (1,)

_T = TypeVar("_T")
_REMEDY = "measure it again with `oallama profile MODEL --refresh`"


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The profile as its JSON object (tuples as lists; bytes and seconds as they are)."""
    record = asdict(profile)
    record["rest"] = [rest_to_json(rest) for rest in profile.rest]
    record["link"] = {name: fit_to_json(fit) for name, fit in profile.link.items()}
    record["boundary"] = fit_to_json(profile.boundary) if profile.boundary else None
    if not profile.sharing:
        del record["sharing"]
    for name in ("copy_wait", "launch_issue_s"):
        if record[name] is None:
            del record[name]
    text: dict[str, Any] = json.loads(json.dumps(record, allow_nan=False))
    return text


def fit_to_json(fit: LinearFit) -> dict[str, Any]:
    """`alpha_s`, `beta_s_per_byte`, `r2`, and the points [bytes, seconds]."""
    return {**asdict(fit), "points": [list(point) for point in fit.points]}


def rest_to_json(rest: RestCase) -> dict[str, Any]:
    """One rest case; the head shape lies flat beside the other fields."""
    record = asdict(rest)
    shape = record.pop("shape") or {}
    shape = {name: value for name, value in shape.items() if (name, value) not in _DEFAULT_CACHE}
    samples = list(record.pop("samples"))
    return {**record, **shape, "samples": samples}


_DEFAULT_CACHE = (("type_k", "f16"), ("type_v", "f16"))


def profile_from_json(record: Any) -> Profile:
    """The profile of a JSON object. Unknown keys are ignored; what is missing, of a wrong type or of an unknown version
    raises ProfileError that names it."""
    if not isinstance(record, dict):
        raise ProfileError(f"this is not a profile: a JSON object was expected; {_REMEDY}")
    version = record.get("version")
    if version not in READABLE_VERSIONS or isinstance(version, bool):
        known = ", ".join(map(str, READABLE_VERSIONS))
        raise ProfileError(f"profile version {version!r} is not known (known: {known}); {_REMEDY}")
    top = _Reader(record, "profile")
    return Profile(
        version=VERSION,
        fingerprint=dict(top.get("fingerprint", dict)),
        device=top.text("device"),
        cases=top.each("cases", _case),
        rest=top.each("rest", _rest),
        link={str(name): _fit(top.inside(f"link.{name}", fit)) for name, fit in top.get("link", dict).items()},
        boundary=top.optional("boundary", _fit),
        contention=top.optional("contention", _contention),
        launch_s=top.number("launch_s"),
        warnings=tuple(str(warning) for warning in top.get("warnings", list)),
        skipped=top.each("skipped", _skipped),
        sharing=top.each("sharing", _sharing) if "sharing" in record else (),
        copy_wait=top.number("copy_wait") if record.get("copy_wait") is not None else None,
        launch_issue_s=top.number("launch_issue_s") if record.get("launch_issue_s") is not None else None,
    )


def read_profile(path: str | Path) -> Profile:
    """The profile in a file (`--profile FILE`). Raises ProfileError: cannot be read, not JSON, not a known profile."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ProfileError(f"cannot read the profile {path}: {reason}; {_REMEDY}") from None
    try:
        return profile_from_json(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        raise ProfileError(f"{path} is not a JSON profile; {_REMEDY}") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _Reader:
    """Typed access to one JSON object, with a name for error messages."""

    def __init__(self, record: Any, where: str) -> None:
        self.record = record
        self.where = where
        if not isinstance(record, dict):
            raise ProfileError(f"{where} is not an object; {_REMEDY}")

    def get(self, name: str, kind: type[_T]) -> _T:
        value = self.record.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            state = "is missing" if name not in self.record else f"must be {kind.__name__}"
            raise ProfileError(f"{self.where}: {name} {state}; {_REMEDY}")
        return value

    def text(self, name: str) -> str:
        return self.get(name, str)

    def count(self, name: str) -> int:
        value = self.get(name, int)
        if value < 0:
            raise ProfileError(f"{self.where}: {name} is negative; {_REMEDY}")
        return value

    def number(self, name: str, above_zero: bool = False) -> float:
        return _number(self.record.get(name), f"{self.where}: {name}", above_zero)

    def samples(self) -> tuple[float, ...]:
        values = self.get("samples", list)
        if not values:
            raise ProfileError(f"{self.where}: samples is empty; {_REMEDY}")
        return tuple(_number(value, f"{self.where}: samples", True) for value in values)

    def shape(self) -> Shape:
        values = self.get("shape", list)
        if len(values) != 3 or not all(type(value) is int and value > 0 for value in values):
            raise ProfileError(f"{self.where}: shape must be three sizes above 0; {_REMEDY}")
        return values[0], values[1], values[2]

    def inside(self, name: str, record: Any) -> _Reader:
        return _Reader(record, f"{self.where}.{name}")

    def each(self, name: str, read: Callable[[_Reader], _T]) -> tuple[_T, ...]:
        return tuple(read(self.inside(f"{name}[{i}]", record)) for i, record in enumerate(self.get(name, list)))

    def optional(self, name: str, read: Callable[[_Reader], _T]) -> _T | None:
        return None if self.record.get(name) is None else read(self.inside(name, self.record[name]))


def _number(value: Any, where: str, above_zero: bool = False, signed: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.float_info.max:
        raise ProfileError(f"{where} must be a number; {_REMEDY}")
    if not signed and (value < 0 or (above_zero and value == 0)):
        raise ProfileError(f"{where} must be above 0; {_REMEDY}")
    return float(value)


def _case(reader: _Reader) -> ProfileCase:
    return ProfileCase(
        device=reader.text("device"),
        layout=reader.text("layout"),
        type=reader.text("type"),
        shape=reader.shape(),
        n_expert_used=reader.count("n_expert_used"),
        n_tokens=reader.count("n_tokens"),
        seconds=reader.number("seconds", above_zero=True),
        samples=reader.samples(),
        gb_per_s=reader.number("gb_per_s"),
        gflops=reader.number("gflops"),
        working_set_bytes=reader.count("working_set_bytes"),
        op=reader.text("op"),
    )


def _skipped(reader: _Reader) -> SkippedCase:
    return SkippedCase(
        device=reader.text("device"),
        layout=reader.text("layout"),
        type=reader.text("type"),
        shape=reader.shape(),
        n_expert_used=reader.count("n_expert_used"),
        n_tokens=reader.count("n_tokens"),
        working_set_bytes=reader.count("working_set_bytes"),
        reason=reader.text("reason"),
        op=reader.text("op"),
    )


def _rest(reader: _Reader) -> RestCase:
    stated = "n_embd" in reader.record
    return RestCase(
        device=reader.text("device"),
        n_tokens=reader.count("n_tokens"),
        n_kv=reader.count("n_kv"),
        seconds=reader.number("seconds", above_zero=True),
        samples=reader.samples(),
        shape=_rest_shape(reader) if stated else None,
    )


def _rest_shape(reader: _Reader) -> RestShape:
    return RestShape(
        n_embd=reader.count("n_embd"),
        n_head=reader.count("n_head"),
        n_head_kv=reader.count("n_head_kv"),
        n_embd_head_k=reader.count("n_embd_head_k"),
        n_embd_head_v=reader.count("n_embd_head_v"),
        n_ff=reader.count("n_ff"),
        flash_attn=reader.get("flash_attn", bool),
        **{name: reader.text(name) for name, _ in _DEFAULT_CACHE if name in reader.record},
    )


def _fit(reader: _Reader) -> LinearFit:
    points = reader.get("points", list)
    return LinearFit(
        alpha_s=reader.number("alpha_s"),
        beta_s_per_byte=reader.number("beta_s_per_byte"),
        r2=_number(reader.record.get("r2"), f"{reader.where}: r2", signed=True),  # a line may fit worse than a constant
        points=tuple(_point(point, reader.where) for point in points),
    )


def _point(point: Any, where: str) -> tuple[int, float]:
    if not isinstance(point, list) or len(point) != 2 or type(point[0]) is not int:
        raise ProfileError(f"{where}: points must be pairs [bytes, seconds]; {_REMEDY}")
    return point[0], _number(point[1], f"{where}: points", signed=True)  # a difference of two times may be negative


def _sharing(reader: _Reader) -> Sharing:
    return Sharing(
        first=_worker(reader, "first"),
        second=_worker(reader, "second"),
        n_tokens=reader.count("n_tokens"),
        first_alone_gb_per_s=reader.number("first_alone_gb_per_s", above_zero=True),
        second_alone_gb_per_s=reader.number("second_alone_gb_per_s", above_zero=True),
        first_with_second_gb_per_s=reader.number("first_with_second_gb_per_s"),
        second_with_first_gb_per_s=reader.number("second_with_first_gb_per_s"),
    )


def _worker(reader: _Reader, name: str) -> Worker:
    for worker in get_args(Worker):
        if reader.text(name) == worker:
            return cast(Worker, worker)
    raise ProfileError(f"{reader.where}: {name} must be one of {', '.join(get_args(Worker))}; {_REMEDY}")


def _contention(reader: _Reader) -> Contention:
    return Contention(
        cpu_alone_gb_per_s=reader.number("cpu_alone_gb_per_s"),
        link_alone_gb_per_s=reader.number("link_alone_gb_per_s"),
        cpu_with_link_gb_per_s=reader.number("cpu_with_link_gb_per_s"),
        link_with_cpu_gb_per_s=reader.number("link_with_cpu_gb_per_s"),
    )
