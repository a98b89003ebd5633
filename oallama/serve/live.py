"""Live numbers: speeds, from llama-server's /metrics, and runs of split blocks, from the plug-in's file. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from oallama.core.history import BlockRuns

_LINE = re.compile(r"llamacpp:(\w+) (\S+)")
_N_FIELDS = 7  # of a line of the plug-in's file, before the name


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens, and the seconds that their requests spent on them."""

    tokens: int
    seconds: float
    tokens_per_s: float | None  # of a request; None before there was one


@dataclass(frozen=True, slots=True)
class Live:
    """Counts since llama-server started. processing, waiting: requests now."""

    prompt: Rate
    generation: Rate
    prompt_tokens_cached: int
    processing: int
    waiting: int


def live_of(text: str) -> Live:
    """Read the text of /metrics; what it does not name is 0."""
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


def block_runs(text: str) -> list[BlockRuns]:
    """Read the plug-in's file (times_file.h). Lines that are damaged are left out."""
    found = []
    for line in text.splitlines():
        words = line.split(" ", _N_FIELDS)
        if len(words) == _N_FIELDS + 1 and all(word.isascii() and word.isdecimal() for word in words[:-1]):
            batch, n_runs, n_tokens, *nanoseconds = map(int, words[:-1])
            launch_s, host_s, wait_s, join_s = (ns * 1e-9 for ns in nanoseconds)
            if n_runs:
                found.append(BlockRuns(words[-1], batch, n_runs, n_tokens, host_s, wait_s, launch_s + join_s))
    return found
