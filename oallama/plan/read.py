"""Reading values out of parsed JSON: each fault is one sentence naming the file, the key, and what was expected."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from oallama.core.errors import PlanError


class Reader:
    """One JSON object; `source` says where it stands, such as `plan.json: operators[3]`. Methods raise PlanError."""

    def __init__(self, document: Any, source: str) -> None:
        if not isinstance(document, dict):
            raise PlanError(f"{source} is {shown(document)}, but a JSON object is needed")
        self.document: dict[str, Any] = document
        self.source = source

    def section(self, key: str) -> Reader:
        return Reader(self._get(key), f"{self.source}: {key}")

    def rows(self, key: str) -> list[Reader]:
        """The objects of a list."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return [Reader(row, f"{self.source}: {key}[{index}]") for index, row in enumerate(value)]

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of text."""
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of text")
        return tuple(value)

    def text(self, key: str) -> str:
        """Text in one line, without what steers a terminal."""
        value = self._get(key)
        if not isinstance(value, str) or not value.isprintable():
            raise self._wrong(key, "text")
        return value

    def path(self, key: str) -> str:
        """The name of a file, which may be any."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "the name of a file")
        return value

    def whole(self, key: str, least: int | None = None, default: int | None = None, bits: int = 64) -> int:
        """A whole number of so many bits, at least `least`; `default` where the key is absent."""
        if default is not None and key not in self.document:
            return default
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            raise self._wrong(key, "a whole number" + (f" of at least {least}" if least is not None else ""))
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise self._wrong(key, f"a whole number of {bits} bits")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(key, "a finite number")
        return number

    def flag(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def is_null(self, key: str) -> bool:
        """Whether the value is there and null."""
        return self._get(key) is None

    def _get(self, key: str) -> Any:
        if key not in self.document:
            raise PlanError(f"{self.source} has no {key!r}; it is not a plan that `oallama plan` wrote")
        return self.document[key]

    def _wrong(self, key: str, wanted: str) -> PlanError:
        return PlanError(f"{self.source}: {key} is {shown(self.document[key])}, but {wanted} is needed")


def shown(value: Any) -> str:
    """A value as a reader of JSON knows it, shortened."""
    text = reprlib.repr(value) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
