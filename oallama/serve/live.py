"""Live speeds from llama-server's /metrics. Pure."""

from __future__ import annotations

import math
import re
from typing import Any

_LINE = re.compile(r"llamacpp:(\w+) (\S+)")


def live_of(text: str) -> dict[str, Any]:
    """Read the text of /metrics: counts since llama-server's start, and current requests. Missing values are 0.
    tokens_per_s: per request; None before the first."""
    values = dict(_LINE.findall(text))

    def number(name: str) -> float:
        try:
            value = float(values.get(name, "0"))
        except ValueError:
            return 0.0
        return value if math.isfinite(value) and value > 0 else 0.0

    def rate(tokens: str, seconds: str) -> dict[str, float | None]:
        n, s = number(tokens), number(seconds)
        return {"tokens": int(n), "seconds": s, "tokens_per_s": n / s if n > 0 and s > 0 else None}

    return {
        "prompt": rate("prompt_tokens_total", "prompt_seconds_total"),
        "generation": rate("tokens_predicted_total", "tokens_predicted_seconds_total"),
        "prompt_tokens_cached": int(number("prompt_tokens_cached_total")),
        "processing": int(number("requests_processing")),
        "waiting": int(number("requests_deferred")),
    }
