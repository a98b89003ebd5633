"""Paired samples of a candidate and stock, and whether the candidate has won, lost or is open; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.bench.records import BenchTest, Block, Sample, Series
from oallama.bench.schedule import MAX_DRIFT
from oallama.bench.stats import LEAST_PAIRS, Ratio, speed_ratio

WORTH = 1.02  # as many times as fast as stock is worth a second look
MOST_PAIRS = 2 * LEAST_PAIRS  # of both looks together
WIDE = 1.25  # an interval around 1 whose upper end is more than so many times the lower one says nothing
HOPELESS = 0.9  # slower than that in each of the first two pairs: given up


@dataclass(frozen=True, slots=True)
class Pairs:
    """What was measured of a candidate in one test: a series in which arm 0 is stock and arm 1 the candidate."""

    policy: str
    placement: str  # the candidate's
    series: Series

    @property
    def test(self) -> BenchTest:
        return self.series.test

    @property
    def n_pairs(self) -> int:
        return len(self.series.samples(0))


Standing = Literal["won", "lost", "open"]
"""Of a candidate in one test: open is what more pairs may still decide."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate against stock at one depth, by the time of the user's own prompt and generation. ratio None:
    there is none, for the reason in `refused`."""

    policy: str
    n_depth: int
    ratio: Ratio | None
    refused: str = ""

    @property
    def beats_stock(self) -> bool:
        return self.ratio is not None and self.ratio.low > 1.0


def weighted_seconds(sample: Sample, measured: BenchTest, n_prompt: int, n_gen: int) -> float:
    """Seconds of the user's prompt and generation, from a sample of a shorter test."""
    prompt = sample.prompt_s * n_prompt / measured.n_prompt if measured.n_prompt else 0.0
    return prompt + (sample.gen_s * n_gen / measured.n_gen if measured.n_gen else 0.0)


def trial(pairs: Pairs, n_prompt: int, n_gen: int, refused: str = "") -> Trial:
    """What the pairs say of the user's prompt and generation; `refused`: why they say nothing."""
    stock, own = _seconds(pairs, n_prompt, n_gen)
    ratio = None if refused else speed_ratio(stock, own)
    if not refused and ratio is None:
        refused = "too few samples"
        if _hopeless(stock, own):
            best = max(s / o for s, o in zip(stock, own, strict=True))
            refused = f"{pairs.policy} was given up, at most {best:.2f}× as fast as stock in {len(own)} pairs"
    return Trial(pairs.policy, pairs.test.n_depth, ratio, refused)


def standing(pairs: Pairs, n_prompt: int, n_gen: int) -> Standing:
    """Whether the candidate has won or lost by the pairs so far. LEAST_PAIRS give an interval; a candidate that seems
    worth it but for the noise, or whose interval is wide, gets as many again."""
    stock, own = _seconds(pairs, n_prompt, n_gen)
    if _hopeless(stock, own):
        return "lost"
    ratio = speed_ratio(stock, own)
    if ratio is None:
        return "open"
    if ratio.low > 1.0:
        return "won"
    if ratio.value >= WORTH and ratio.n_pairs < MOST_PAIRS:
        return "open"
    return "lost" if settles(ratio) else "open"


def settles(ratio: Ratio) -> bool:
    """Whether an interval says that one of both is faster, or that it makes no difference."""
    return ratio.low > 1.0 or ratio.high < WORTH or ratio.high <= WIDE * ratio.low


def _hopeless(stock: Sequence[float], own: Sequence[float]) -> bool:
    return len(own) >= 2 and all(s < HOPELESS * o for s, o in zip(stock, own, strict=True))


def _seconds(pairs: Pairs, n_prompt: int, n_gen: int) -> tuple[list[float], list[float]]:
    """Of the user's prompt and generation, by stock's samples and the candidate's."""
    stock, own = (
        [weighted_seconds(sample, pairs.test, n_prompt, n_gen) for sample in pairs.series.samples(arm)]
        for arm in (0, 1)
    )
    return stock, own


def pairs_of(policy: str, placement: str, series: Series, arm: int) -> Pairs:
    """The candidate at position `arm` of a series whose first arm is stock, as far as it was measured."""
    blocks = tuple(
        Block((block.samples[0], block.samples[arm]), block.drift) for block in series.kept if block.samples[arm]
    )
    return Pairs(policy, placement, Series(series.test, blocks))


def together(first: Pairs, second: Pairs) -> Pairs:
    kept = (*first.series.kept, *second.series.kept)
    return Pairs(first.policy, first.placement, Series(first.test, kept))


def worth_keeping(pairs: Pairs, n_prompt: int, n_gen: int) -> Pairs | None:
    """What of the pairs may count the next time: calm blocks; None where all of them together say nothing at all."""
    ratio = trial(pairs, n_prompt, n_gen).ratio
    if ratio is not None and not settles(ratio):
        return None
    calm = tuple(block for block in pairs.series.kept if block.drift <= MAX_DRIFT)
    return Pairs(pairs.policy, pairs.placement, Series(pairs.test, calm)) if calm else None
