"""Acceptance of drafts: by position, for each pair of models, and its cache file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from oallama.core.codec import Count, Mark
from oallama.core.files import cache_folder
from oallama.profile.store import read_in_cache, write_in_cache

VERSION = 1
ENOUGH_STEPS = 64  # decode steps with drafts, from which rates are believed: within 0.06 of the true ones, usually
MEMORY_STEPS = 4096  # older steps weigh no more than so many

PUBLISHED = (0.762, 0.616, 0.513, 0.424, 0.364, 0.309, 0.272)
"""Default acceptance rates of the first, the second, … draft: published for eight drafts of a multi-token head on
GSM8K, greedy (vLLM, pull request 48892, August 2026)."""

_STEPS = re.compile(r"^llamacpp:spec_decode_num_drafts_total (\d+)", re.MULTILINE)
_ACCEPTED = re.compile(
    r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Decode steps with drafts, and in how many of them the first, the second, … was accepted."""

    n_steps: Annotated[Count, Mark.REQUIRED]
    accepted: Annotated[tuple[Count, ...], Mark.REQUIRED]

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance rates by position; the published ones after too few steps. Positions without drafts are scaled
        like the last position with drafts."""
        if self.n_steps < ENOUGH_STEPS or not self.accepted:
            return PUBLISHED
        measured = [min(1.0, n / self.n_steps) for n in self.accepted[: len(PUBLISHED)]]
        scale = measured[-1] / PUBLISHED[len(measured) - 1]
        return (*measured, *(min(measured[-1], scale * rate) for rate in PUBLISHED[len(measured) :]))

    def with_more(self, other: Acceptance) -> Acceptance:
        """The sum of both. A position that only one of them has uses that one's steps."""
        share = min(1.0, MEMORY_STEPS / self.n_steps) if self.n_steps else 0.0
        n = max(len(self.accepted), len(other.accepted))
        n_steps = int(share * self.n_steps)
        total = n_steps + other.n_steps

        def sum_at(i: int) -> int:
            both = [
                (share * acceptance.accepted[i] if acceptance is self else acceptance.accepted[i], steps)
                for acceptance, steps in ((self, n_steps), (other, other.n_steps))
                if i < len(acceptance.accepted)
            ]
            steps = sum(steps for _, steps in both)
            return round(sum(n for n, _ in both) * total / steps) if steps else 0

        return Acceptance(total, tuple(accumulate(map(sum_at, range(n)), min)))


NO_ACCEPTANCE = Acceptance(0, ())


def acceptance_in(metrics: str) -> Acceptance | None:
    """Acceptance from llama-server's /metrics; None if it made no drafts."""
    steps = _STEPS.search(metrics)
    by_position = {int(position): int(n) for position, n in _ACCEPTED.findall(metrics)}
    if steps is None or not int(steps[1]) or sorted(by_position) != list(range(len(by_position))):
        return None
    return Acceptance(int(steps[1]), tuple(by_position[i] for i in range(len(by_position))))


def acceptance_path(fingerprint: str, draft_fingerprint: str) -> Path:
    """The file for a model and its draft model."""
    return cache_folder() / f"acceptance-v{VERSION}-{fingerprint[:16]}-{draft_fingerprint[:16]}.json"


def read_acceptance(fingerprint: str, draft_fingerprint: str) -> Acceptance:
    """The recorded acceptance of these models; NO_ACCEPTANCE if there is none."""
    acceptance = read_in_cache(Acceptance, acceptance_path(fingerprint, draft_fingerprint))
    return acceptance if acceptance is not None and _falls(acceptance.accepted, acceptance.n_steps) else NO_ACCEPTANCE


def keep_acceptance(fingerprint: str, draft_fingerprint: str, seen: Acceptance) -> None:
    """Add measured acceptance. Raises ProfileError if the cache cannot be written."""
    known = read_acceptance(fingerprint, draft_fingerprint).with_more(seen)
    write_in_cache(acceptance_path(fingerprint, draft_fingerprint), known)


def _falls(counts: Sequence[int], most: int) -> bool:
    return all(count <= previous for previous, count in zip((most, *counts), counts, strict=False))
