"""Routing drawn at random with a given concentration and a given overlap of consecutive tokens.

A token's experts are a set of fixed size with given inclusion probabilities: conditional Poisson sampling (Hájek 1964),
whose odds follow from the probabilities by the fixed point of Chen, Dempster & Liu (1994). From one token to the next
each expert is kept with one probability, and the others are drawn anew given those. That chain is reversible with
respect to the same distribution, so keeping changes the overlap and leaves the concentration as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import numpy as np
import numpy.typing as npt

from routing.table import Row, overlap

Floats = npt.NDArray[np.float64]

_LARGEST = 0.98  # of an inclusion probability: odds grow without bound towards 1
_PILOT_TOKENS = 6000
_HALVINGS = 12


@dataclass(frozen=True)
class RoutingDraw:
    """What is drawn. shares: of traffic, one an expert. overlap: None for tokens that know nothing of each other.
    topics: equal stretches of tokens, in each of which other experts are the used ones."""

    n_layer: int
    shares: tuple[float, ...]
    n_used: int
    n_tokens: int
    overlap: float | None = None
    topics: int = 1
    seed: int = 0


def zipf_shares(n_expert: int, exponent: float) -> tuple[float, ...]:
    """Traffic in proportion to rank^-exponent."""
    return _normalised([rank**-exponent for rank in range(1, n_expert + 1)])


def curve_shares(n_expert: int, points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Traffic of a concentration curve, straight between its points (share of experts, share of traffic).

    Raises ValueError where it does not rise from (0, 0) to (1, 1), or gives less used experts more.
    """
    whole = [(0.0, 0.0), *points, (1.0, 1.0)]
    slopes = []
    for (x0, y0), (x1, y1) in pairwise(whole):
        if x1 <= x0 or y1 < y0:
            raise ValueError("a curve's points rise, in experts and in traffic, and lie between 0% and 100%")
        slopes.append((y1 - y0) / (x1 - x0))
    if any(later > earlier * (1 + 1e-9) for earlier, later in pairwise(slopes)):
        raise ValueError("a curve is of the most used experts first: its slope must not grow")
    quantiles = np.interp(np.linspace(0, 1, n_expert + 1), *zip(*whole, strict=True))
    return _normalised(np.diff(quantiles).tolist())


def draw(drawing: RoutingDraw) -> dict[int, list[Row]]:
    """Rows by layer; which experts are the used ones differs by layer and topic. Raises ValueError where the shares or
    the overlap cannot be."""
    n_expert = len(drawing.shares)
    odds = odds_of(drawing.shares, drawing.n_used)
    keep = 0.0 if drawing.overlap is None else keep_for(odds, drawing.n_used, drawing.overlap)
    made: dict[int, list[Row]] = {}
    for layer in range(drawing.n_layer):
        rows: list[Row] = []
        for topic in range(drawing.topics):
            rng = random.Random(f"{drawing.seed}/{layer}/{topic}")
            names = rng.sample(range(n_expert), n_expert)
            end = drawing.n_tokens * (topic + 1) // drawing.topics
            chain = islice(chained(odds, drawing.n_used, keep, rng), end - len(rows))
            rows += [tuple(names[i] for i in row) for row in chain]
        made[layer] = rows
    return made


def chained(odds: Sequence[float], n_used: int, keep: float, rng: random.Random) -> Iterator[Row]:
    """Rows without end, each keeping each expert of the one before with probability `keep`."""
    population, cumulated = range(len(odds)), list(accumulate(odds))
    row: Row = ()
    while True:
        kept = [expert for expert in row if rng.random() < keep]
        while True:  # independent draws, taken where all are distinct: sets in proportion to the product of their odds
            row = (*kept, *rng.choices(population, cum_weights=cumulated, k=n_used - len(kept)))
            if len(set(row)) == n_used:
                break
        yield row


def keep_for(odds: Sequence[float], n_used: int, wanted: float) -> float:
    """The probability of keeping that gives this overlap, by halving over a drawn pilot run."""
    rows = islice(chained(odds, n_used, 0.0, random.Random(0)), _PILOT_TOKENS)
    least = overlap(list(rows))
    if not least - 0.02 <= wanted < 1.0:
        raise ValueError(f"an overlap of {wanted:.3g} cannot be: chance alone gives {least:.3g} here, and 1 is a stop")
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = overlap(list(islice(chained(odds, n_used, middle, random.Random(1)), _PILOT_TOKENS)))
        low, high = (middle, high) if found < wanted else (low, middle)
    return (low + high) / 2


def odds_of(shares: Sequence[float], n_used: int) -> list[float]:
    """Odds whose sets of n_used experts have inclusion probabilities n_used * shares. Raises ValueError."""
    n = len(shares)
    if not 0 < n_used <= n:
        raise ValueError(f"a token cannot use {n_used} of {n} experts")
    if n_used == n:
        return [1.0] * n
    wanted = n_used * np.array(shares)
    if wanted.max() > _LARGEST:
        raise ValueError(
            f"the most used of {n} experts would be used by {wanted.max():.2f} of all tokens when each uses {n_used}; "
            "ask for less concentration"
        )
    wanted = np.maximum(wanted, 1e-9)
    odds = wanted / (1 - wanted)
    for _ in range(200):
        found = inclusion(odds, n_used)
        if np.abs(found - wanted).max() < 1e-9:
            break
        odds *= wanted / (1 - wanted) * (1 - found) / found
        odds /= odds.mean()
    return [float(value) for value in odds]


def inclusion(odds: Floats, n_used: int) -> Floats:
    """Probability of each element to be in a set of n_used that is drawn in proportion to the product of its odds.

    By elementary symmetric polynomials of those before and of those behind the element; all terms are positive.
    """
    left, right = _symmetric(odds, n_used), _symmetric(odds[::-1], n_used)[::-1]
    without = (left[:-1, :n_used] * right[1:, n_used - 1 :: -1]).sum(1)
    found: Floats = odds * without / left[-1, n_used]
    return found


def _symmetric(odds: Floats, n_used: int) -> Floats:
    """[i, j]: sum over the sets of j of the first i elements of the product of their odds."""
    table = np.zeros((len(odds) + 1, n_used + 1))
    table[0, 0] = 1.0
    for i, odd in enumerate(odds):
        table[i + 1] = table[i]
        table[i + 1, 1:] += odd * table[i, :-1]
    return table


def _normalised(values: Sequence[float]) -> tuple[float, ...]:
    total = sum(values)
    return tuple(value / total for value in values)
