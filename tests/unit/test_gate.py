"""The gate's test and verdict: whatever is looked at when, a plan that is no faster wins in 5 of 100 cases at most."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from seeds import ALL

from oallama.bench.records import BenchTest
from oallama.gate.verdict import ERROR, MOST_PAIRS, MOST_RACES, Race, Verdict, speed_interval, weighted_seconds
from oallama.run.stock import StockPlacement

KEY = {"model": "m" * 64, "n_threads": 2, "gpu_weights": None, "type_k": "f16"}
Draw = Callable[[np.random.Generator], npt.NDArray[np.float64]]


def race(*times_as_fast: float, policy: str = "split", promised: float | None = None, refused: str = "") -> Race:
    return Race(policy, promised, tuple((times, 1.0) for times in times_as_fast), refused)


def verdict(*races: Race) -> Verdict:
    return Verdict(KEY, "stock-fit", StockPlacement(20), (BenchTest(64, 16),), races, 0.5, 12.0, "2026-11-26T00:00:00Z")


def looked_at_after_each_block(logs: npt.NDArray[np.float64], error: float) -> tuple[bool, bool]:
    """Whether an interval ever lay above 1, and whether one ever missed it."""
    pairs = [(math.exp(log), 1.0) for log in logs]
    found = [speed_interval(pairs[:n], error) for n in range(2, len(pairs) + 1, 2)]
    missed = [ratio for ratio in found if ratio is not None and not ratio.low <= 1 <= ratio.high]
    return any(ratio.low > 1 for ratio in missed), bool(missed)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.normal(0, 0.05, MOST_PAIRS),
        lambda rng: rng.standard_t(3, MOST_PAIRS) * 0.05,
        lambda rng: (
            rng.normal(0, 0.02, MOST_PAIRS) + (rng.random(MOST_PAIRS) < 0.1) * rng.choice([-0.7, 0.7], MOST_PAIRS)
        ),
        lambda rng: np.convolve(rng.normal(0, 0.05, MOST_PAIRS + 1), [1, 0.5], "valid"),
    ],
    ids=["normal", "heavy tails", "turns that stall", "turns that follow each other"],
)
def test_the_error_is_kept_whenever_it_is_looked_at(draw: Draw) -> None:
    """Of candidates as fast as stock: each has its share of the error."""
    rng = np.random.default_rng(7)
    n = 1000 if ALL else 300
    found = [looked_at_after_each_block(draw(rng), ERROR / MOST_RACES) for _ in range(n)]
    assert sum(won for won, _ in found) / n <= ERROR / MOST_RACES
    assert sum(missed for _, missed in found) / n <= ERROR


def pairs_until_it_wins(times: float, noise: float, seed: int) -> int:
    rng = np.random.default_rng(seed)
    now = race()
    while now.standing == "open":
        now = replace(now, pairs=(*now.pairs, *((times * math.exp(rng.normal(0, noise)), 1.0) for _ in range(2))))
    return len(now.pairs) if now.standing == "won" else MOST_PAIRS + 1


@pytest.mark.parametrize(("times", "noise", "most"), [(1.5, 0.05, 4), (1.3, 0.05, 6), (1.1, 0.05, 12), (1.05, 0.02, 8)])
def test_the_larger_the_difference_the_fewer_pairs_tell_it(times: float, noise: float, most: int) -> None:
    assert np.median([pairs_until_it_wins(times, noise, seed) for seed in range(60)]) <= most


def test_an_interval_needs_pairs_and_lies_around_their_mean() -> None:
    assert speed_interval([], 0.05) is speed_interval([(1.2, 1.0)] * 2, 0.05) is None
    found = speed_interval([(1.2, 1.0), (1.3, 1.0), (1.25, 1.0), (1.22, 1.0)], 0.05)
    assert found is not None and found.low < found.value < found.high and found.n_pairs == 4
    assert found.value == pytest.approx((1.2 * 1.3 * 1.25 * 1.22) ** 0.25)
    same = speed_interval([(1.2, 1.0)] * 4, 0.05)
    assert same is not None and (same.low, same.high) == pytest.approx((1.2, 1.2))


def test_a_race_is_won_lost_or_open() -> None:
    assert race().standing == race(1.5, 1.5).standing == "open"
    assert race(1.5, 1.52, 1.49, 1.5).standing == "won"
    assert race(0.8, 0.81, 0.79, 0.8).standing == "lost"
    assert race(1.0, 1.001, 0.999, 1.0, 1.0, 1.0).standing == "lost", "it is not worth another plan"
    noisy = [1.3, 0.8] * (MOST_PAIRS // 2)
    assert race(*noisy[:-2]).standing == "open"
    assert race(*noisy).standing == "lost", "no difference to speak of"
    assert race(1.5, 1.52, 1.49, 1.5, refused="it ran elsewhere").standing == "lost"


def test_the_first_that_wins_is_used_and_what_is_open_goes_on() -> None:
    won, lost = race(1.34, 1.35, 1.33, 1.34), race(0.8, 0.8, 0.8, 0.81, policy="cpu")
    found = verdict(won, race(policy="cpu"))
    assert found.settled and found.won == won and found.open is None
    assert found.sentence.startswith("split 1.34× stock (95 % 1.") and found.sentence.endswith(", using it")
    unsettled = verdict(race(promised=1.53), lost)
    assert not unsettled.settled and unsettled.open == unsettled.races[0]
    assert unsettled.sentence == "using stock-fit's placement; split is predicted 1.5× as fast"
    assert "measured" in verdict(race(1.5, 0.9, 1.2, 1.3, promised=1.5)).sentence
    assert verdict(lost).settled and verdict(lost).sentence.endswith("slower, using stock-fit's placement")
    assert "not beyond noise" in verdict(race(*[1.0, 1.01] * 10)).sentence
    assert verdict().sentence == "using stock-fit's placement: there was nothing to compare"
    assert verdict(race(refused="no room")).sentence == "using stock-fit's placement: no room"


def test_short_tests_stand_for_the_workload() -> None:
    assert weighted_seconds(2.0, 1.0, BenchTest(64, 16), 512, 160) == pytest.approx(2.0 * 8 + 1.0 * 10)
