"""Live speeds from llama-server's /metrics. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_LINE = re.compile(r"llamacpp:(\w+) (\S+)")


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens, and the seconds of their requests."""

    tokens: int
    seconds: float
    tokens_per_s: float | None  # per request; None before the first request


@dataclass(frozen=True, slots=True)
class Live:
    """Counts since llama-server's start. processing, waiting: current requests."""

    prompt: Rate
    generation: Rate
    prompt_tokens_cached: int
    processing: int
    waiting: int


def live_of(text: str) -> Live:
    """Read the text of /metrics; missing values are 0."""
    values = dict(_LINE.findall(text))

    def number(name: str) -> float:
        try:
            value = float(values.get(name, "0"))
        except ValueError:
            return 0.0
        return value if math.isfinite(value) and value > 0 else 0.0

    def rate(tokens: str, seconds: str) -> Rate:
        n, s = number(tokens), number(seconds)
        return Rate(int(n), s, n / s if n > 0 and s > 0 else None)

    return Live(
        rate("prompt_tokens_total", "prompt_seconds_total"),
        rate("tokens_predicted_total", "tokens_predicted_seconds_total"),
        int(number("prompt_tokens_cached_total")),
        int(number("requests_processing")),
        int(number("requests_deferred")),
    )
