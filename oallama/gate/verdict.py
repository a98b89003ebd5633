"""Measurements of the gate for one key: pairs of turns, a test that may be looked at after each, the verdict. Pure.

Candidates are raced against stock llama.cpp one after another, the best prediction first. One wins as soon as the whole
interval of its pairs lies above stock's speed, and loses as soon as it cannot be worth it. Where none has won, stock's
own placement is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

from oallama.bench.records import BenchTest
from oallama.bench.stats import Ratio
from oallama.run.stock import StockPlacement

ERROR = 0.05
"""Chance that any candidate wins that is no faster than stock, or that an interval misses the truth; at most."""

SPREAD = 0.05
"""Inverse variance of the effect sizes that are averaged over: a small one tells large effects from four pairs on."""

MOST_RACES = 3  # candidates for one key, among which ERROR is shared out
MOST_PAIRS = 40  # that a candidate gets; an interval around 1 says then that there is no difference to speak of
WORTH = 1.02  # as many times as fast as stock is worth another plan

Key = Mapping[str, Any]
"""Conditions of a verdict: text and numbers."""

Standing = Literal["won", "lost", "open"]


@dataclass(frozen=True, slots=True)
class Race:
    """One candidate against stock. promised: how many times as fast it is predicted to be. pairs: seconds of stock and
    of the candidate, measured right after each other, for the workload of the key; of several depths, those at which
    the candidate is worse. refused: why it is not compared, else empty."""

    policy: str
    promised: float | None = None
    pairs: tuple[tuple[float, float], ...] = ()
    refused: str = ""

    @property
    def ratio(self) -> Ratio | None:
        """Speed relative to stock, with its interval; None: too few pairs to tell."""
        return speed_interval(self.pairs, ERROR / MOST_RACES)

    @property
    def standing(self) -> Standing:
        ratio = self.ratio
        if self.refused:
            return "lost"
        if ratio is not None and ratio.low > 1:
            return "won"
        if len(self.pairs) >= MOST_PAIRS or (ratio is not None and ratio.high < WORTH):
            return "lost"
        return "open"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Measurements and standing for a key. stock: the arm that candidates race against, and its placement. tests: what
    a turn is; turn_s: its predicted seconds. seconds: that all of this took to measure, in all runs."""

    key: Key
    stock: str
    placement: StockPlacement
    tests: tuple[BenchTest, ...]
    races: tuple[Race, ...]
    turn_s: float = 0.0
    seconds: float = 0.0
    measured_at: str = ""  # RFC 3339, UTC

    @property
    def won(self) -> Race | None:
        return next((race for race in self.races if race.standing == "won"), None)

    @property
    def open(self) -> Race | None:
        """The race to go on with; None where the verdict is settled."""
        return None if self.won else next((race for race in self.races if race.standing == "open"), None)

    @property
    def settled(self) -> bool:
        return self.open is None

    def with_race(self, race: Race) -> Verdict:
        """Replace the race of that candidate."""
        return replace(self, races=tuple(race if each.policy == race.policy else each for each in self.races))

    @property
    def sentence(self) -> str:
        """A sentence on what is used, and why: `scheinfer is 1.34× as fast as llama.cpp's placement here (1.29-1.39);
        used from now on`."""
        if won := self.won:
            value, interval = _texts(won)
            return f"{_who(won)} is {value} as fast as llama.cpp's placement here ({interval}); used from now on"
        if race := self.open:
            may = f"may be {race.promised:.2g}× faster" if race.promised else "is not yet distinguishable from it"
            so_far = f", {' so far ('.join(_texts(race))})" if race.ratio else ""
            return f"using llama.cpp's placement; {_who(race)} {may}{so_far}"
        stays = "llama.cpp's placement stays"
        if best := max((race for race in self.races if race.ratio and not race.refused), key=_value, default=None):
            value, interval = _texts(best)
            if best.ratio is not None and best.ratio.high < 1:
                return f"{stays}: {_who(best)} is {value} as fast here ({interval})"
            return f"{stays}: {_who(best)} is not measurably faster, {value} ({interval})"
        return f"{stays}: {next((race.refused for race in self.races), 'nothing to compare it with')}"

    @property
    def document(self) -> dict[str, Any]:
        """The verdict for --json."""
        races = [
            {
                "policy": race.policy, "promised": race.promised, "standing": race.standing, "refused": race.refused,
                "n_pairs": len(race.pairs), "ratio": asdict(race.ratio) if race.ratio else None,
            }
            for race in self.races
        ]  # fmt: skip
        return {
            "key": dict(self.key), "stock": self.stock, "settled": self.settled,
            "winner": self.won.policy if self.won else None, "races": races, "seconds": self.seconds,
            "measured_at": self.measured_at, "said": self.sentence,
        }  # fmt: skip


def weighted_seconds(prompt_s: float, gen_s: float, test: BenchTest, n_prompt: int, n_gen: int) -> float:
    """Seconds of a prompt and a generation of these lengths, from those of a shorter test."""
    return prompt_s * n_prompt / test.n_prompt + gen_s * n_gen / test.n_gen


def _value(race: Race) -> float:
    return race.ratio.value if race.ratio else -math.inf


def _who(race: Race) -> str:
    return {"cpu": "the CPU alone", "stock-cpu": "llama.cpp on the CPU alone"}.get(race.policy, race.policy)


def _texts(race: Race) -> tuple[str, str]:
    """(ratio, its interval), with two decimals where the interval is narrow enough to mean them."""
    ratio = race.ratio
    assert ratio is not None
    n = 2 if ratio.high - ratio.low < 0.5 else 1
    return f"{ratio.value:.{n}f}×", f"{ratio.low:.{n}f}-{ratio.high:.{n}f}"


def speed_interval(pairs: Sequence[tuple[float, float]], error: float) -> Ratio | None:
    """How many times as fast the second side of the pairs of seconds is as the first; None: too few pairs to tell.

    The logarithms of the pairs' ratios are taken for draws from one normal distribution. The interval inverts a mixture
    of t-tests (Lai 1976; Wang and Ramdas 2024, "Anytime-valid t-tests"): the e-value of each mean m is a likelihood
    ratio of "another mean" against "m", averaged over effect sizes and over all deviations. Its chance ever to reach
    1/error is at most `error` where m is the truth. So the interval holds at all numbers of pairs together, in one run
    or over several, and measuring may end as soon as it excludes 1.
    """
    n = len(pairs)
    if n < 2:
        return None
    logs = [math.log(first / second) for first, second in pairs]
    shrink = SPREAD / (n + SPREAD)
    growth = (1 / (error * math.sqrt(shrink))) ** (2 / n)
    if growth * shrink >= 1:
        return None
    half = stdev(logs) * math.sqrt((growth - 1) / (1 - growth * shrink) * (n - 1) / n)
    mean = fmean(logs)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
