"""How much is tested, and the seeds that tests draw with.

`scripts/test` tests what takes minutes, with the same draws in every run. `scripts/test --all`, and any run of named
tests, sets OALLAMA_TEST_ALL: every test, all cases of it, and draws of another seed in each run, told where one fails;
OALLAMA_TEST_SEED=N draws them again.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Sequence
from typing import Any

ALL = bool(os.environ.get("OALLAMA_TEST_ALL"))
_SEED = os.environ.get("OALLAMA_TEST_SEED")
FRESH = int(_SEED) if _SEED else secrets.randbits(32) if ALL else 7
SEEDS = {"fixed": 1, "fresh": FRESH} if ALL else {"fixed": 1}


def crossed(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of several parameters: every combination with --all, else each value once, in as few cases as the longest
    of these has values."""
    if ALL:
        return list(itertools.product(*axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]


def examples(n: int) -> int:
    """How many examples hypothesis draws: n with --all, else a quarter of them."""
    return n if ALL else max(n // 4, 5)
