"""Sampling of tokens: settings of the draw, as llama-server takes them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from oallama.core.errors import UsageError
from oallama.core.keywords import check_fields

REPEAT_LAST_N = 64  # tokens that repeat_penalty looks back, llama.cpp's default


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the draw; the defaults but temperature and seed are llama.cpp's.

    temperature 0: greedy, and of the others only repeat_penalty, grammar and json_schema count. top_k 0, top_p 1,
    min_p 0 and repeat_penalty 1: off. grammar: GBNF with a rule `root` (llama.cpp, grammars/README.md). json_schema: a
    JSON object as text, which llama.cpp makes a grammar of. Raises UsageError.
    """

    temperature: float = 0.8
    seed: int = 0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    grammar: str | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"--temp {self.temperature} is invalid; use 0 (greedy) to 2")
        if self.top_k < 0:
            raise UsageError(f"--top-k must be a number of tokens or 0 for all, not {self.top_k}")
        for name, share in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} must be a probability from 0 to 1, not {share}")
        if not (self.repeat_penalty > 0 and math.isfinite(self.repeat_penalty)):
            raise UsageError(f"--repeat-penalty {self.repeat_penalty} must be positive (1 = off)")
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("a grammar cannot be combined with a JSON schema")
        if self.json_schema is not None:
            parsed_schema(self.json_schema)

    def request(self) -> dict[str, Any]:
        """The fields of a request to llama-server."""
        asked = {name: value for name, value in asdict(self).items() if value is not None}
        asked |= {"seed": self.seed & 0xFFFFFFFF, "repeat_last_n": REPEAT_LAST_N}
        if self.json_schema is not None:
            asked["json_schema"] = parsed_schema(self.json_schema)
        return asked


def parsed_schema(schema: str) -> dict[str, Any]:
    """A JSON schema from its text. Raises UsageError for other values than a JSON object."""
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError('the JSON schema must be a JSON object, e.g. {"type": "object"}')
    return document
