"""The records of routing: how often each expert of a layer is used, by prompts and by decode. They hold no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from oallama.core.codec import Count, Line, Mark, NotNegative, Positive, Size

HALF_LIFE_TOKENS = 4096
"""Tokens of a phase after which a use counts half."""

Uses = tuple[NotNegative, ...]
"""Counts by expert."""


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Uses of one layer's experts in one phase. A recording is one answer or several, long enough to judge sets of
    experts on it (profile/routing.py)."""

    layer: Count
    n_tokens: Count  # counted in total
    uses: Uses  # of the window: a use counts 2^(-tokens since / half-life)
    before: Uses  # the window before the last recording
    latest: Uses  # of the last recording alone, undecayed; sets chosen by `before` are judged on it
    # of the window, by rank: the expert with the highest recent count, the second, …; empty: not recorded
    ranks: Annotated[Uses, Mark.OMIT_DEFAULT] = ()
    # of the window, by reuse distance in tokens: 1, 2 or 3, 4 to 7, …; the last: longer, or never used before
    gaps: Annotated[Uses, Mark.OMIT_DEFAULT] = ()


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Expert counts of a layer over n_tokens tokens: by expert; by rank (the expert with the highest recent count
    first); and by reuse distance in tokens (split/uses.h). ranks, gaps: empty if not recorded."""

    n_tokens: int
    uses: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Expert counts of one answer, by layer."""

    decode: Mapping[int, LayerCounts]
    prompt: Mapping[int, LayerCounts]


@dataclass(frozen=True, slots=True)
class Routing:
    """Expert counts of a model. Layers without experts, and layers without counted tokens, are left out."""

    version: int
    model_fingerprint: Line
    n_expert: Size
    n_expert_used: Size  # by each token in each layer
    half_life_tokens: Positive
    decode: tuple[LayerRouting, ...]
    prompt: tuple[LayerRouting, ...]
