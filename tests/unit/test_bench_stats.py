"""How many times as fast: intervals of comparisons and of the gate, on samples whose truth is known, and verdicts."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import ALL

from oallama.bench.records import BenchTest
from oallama.bench.stats import LEAST_PAIRS, block_drift, speed_ratio, student_t
from oallama.gate.verdict import ERROR, MOST_PAIRS, MOST_RACES, Race, Verdict, speed_interval, weighted_seconds
from oallama.run.stock import StockPlacement

TIMES = st.floats(1e-6, 1e3)


def noisy(seconds, n, seed):
    return [float(s) for s in seconds * np.exp(np.random.default_rng(seed).normal(0, 0.03, n))]


@pytest.mark.parametrize(("truth", "n"), [(1.0, 6), (1.0, 20), (1.34, 8), (0.8, 12)])
def test_the_interval_of_a_comparison_holds_the_truth_in_about_95_of_100_cases(truth, n):
    runs, inside = 300, 0
    for seed in range(runs):
        ratio = speed_ratio(noisy(truth, n, 2 * seed), noisy(1.0, n, 2 * seed + 1), resamples=1000, seed=seed)
        inside += ratio.low <= truth <= ratio.high
    assert 0.91 <= inside / runs <= 0.99


def test_an_interval_needs_enough_pairs_of_times():
    for n in (LEAST_PAIRS - 1, LEAST_PAIRS):
        assert (speed_ratio([1.0] * n, [1.0] * n) is None) is (n < LEAST_PAIRS)
    for a, b in ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, math.nan], [1.0, 1.0]):
        with pytest.raises(ValueError, match=r"pairs|positive"):
            speed_ratio(a, b)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=LEAST_PAIRS, max_size=12))
def test_swapping_the_arms_inverts_the_ratio(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    there, back = speed_ratio(a, b, resamples=200), speed_ratio(b, a, resamples=200)
    assert there.low <= there.value <= there.high
    assert there.value * back.value == pytest.approx(1.0, rel=1e-9)


def test_a_block_that_the_machine_changed_in_shows_it():
    assert block_drift([(1.0, 1.0), (2.0, 2.0)]) == 0
    assert block_drift([(1.0, 1.2), (2.0, 2.4), (5.0, 6.0)]) == pytest.approx(0.2)
    assert block_drift([(1.2, 1.0), (2.4, 2.0), (6.0, 5.0)]) == pytest.approx(0.2)  # whichever way
    assert block_drift([(1.0, 9.0), (2.0, 2.0), (5.0, 5.0)]) == 0  # one arm's hiccup is not the machine's
    with pytest.raises(ValueError, match="arm"):
        block_drift([])


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.57058), (9, 2.26216), (30, 2.04227)])
def test_students_t_is_that_of_the_tables(freedom, quantile):
    assert student_t(0.975, freedom) == pytest.approx(quantile, rel=0.002)


# ---- the gate: whatever is looked at when, a plan that is no faster wins in 5 of 100 cases at most


def race(*times_as_fast, **changes):
    return Race(**{"policy": "split", "promised": None, "pairs": tuple((t, 1.0) for t in times_as_fast), **changes})


def looked_at_after_each_block(logs, error):
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
def test_the_error_is_kept_whenever_it_is_looked_at(draw):
    """Of candidates as fast as stock: each has its share of the error."""
    rng, n = np.random.default_rng(7), 1000 if ALL else 300
    found = [looked_at_after_each_block(draw(rng), ERROR / MOST_RACES) for _ in range(n)]
    assert sum(won for won, _ in found) / n <= ERROR / MOST_RACES
    assert sum(missed for _, missed in found) / n <= ERROR


def pairs_until_it_wins(times, noise, seed):
    rng, now = np.random.default_rng(seed), race()
    while now.standing == "open":
        now = replace(now, pairs=(*now.pairs, *((times * math.exp(rng.normal(0, noise)), 1.0) for _ in range(2))))
    return len(now.pairs) if now.standing == "won" else MOST_PAIRS + 1


@pytest.mark.parametrize(("times", "noise", "most"), [(1.5, 0.05, 4), (1.3, 0.05, 6), (1.1, 0.05, 12), (1.05, 0.02, 8)])
def test_the_larger_the_difference_the_fewer_pairs_tell_it(times, noise, most):
    assert np.median([pairs_until_it_wins(times, noise, seed) for seed in range(60)]) <= most


def test_the_gates_interval_needs_pairs_and_lies_around_their_mean():
    assert speed_interval([], 0.05) is speed_interval([(1.2, 1.0)] * 2, 0.05) is None
    found = speed_interval([(1.2, 1.0), (1.3, 1.0), (1.25, 1.0), (1.22, 1.0)], 0.05)
    assert found.low < found.value < found.high and found.n_pairs == 4
    assert found.value == pytest.approx((1.2 * 1.3 * 1.25 * 1.22) ** 0.25)
    same = speed_interval([(1.2, 1.0)] * 4, 0.05)
    assert (same.low, same.high) == pytest.approx((1.2, 1.2))


NOISY = [1.3, 0.8] * (MOST_PAIRS // 2)


@pytest.mark.parametrize(
    ("made", "standing"),
    [
        (race(), "open"), (race(1.5, 1.5), "open"), (race(*NOISY[:-2]), "open"),
        (race(1.5, 1.52, 1.49, 1.5), "won"),
        (race(0.8, 0.81, 0.79, 0.8), "lost"),
        (race(1.0, 1.001, 0.999, 1.0, 1.0, 1.0), "lost"),  # it is not worth another plan
        (race(*NOISY), "lost"),  # no difference to speak of
        (race(1.5, 1.52, 1.49, 1.5, refused="it ran elsewhere"), "lost"),
    ],
)  # fmt: skip
def test_a_race_is_won_lost_or_open(made, standing):
    assert made.standing == standing


def verdict(*races):
    key = {"model": "m" * 64, "n_threads": 2, "gpu_weights": None, "type_k": "f16"}
    tests, at = (BenchTest(64, 16),), "2026-11-26T00:00:00Z"
    return Verdict(key, "stock-fit", StockPlacement(20), tests, races, 0.5, 12.0, at)


def test_the_first_that_wins_is_used_and_what_is_open_goes_on():
    won, lost = race(1.34, 1.35, 1.33, 1.34), race(0.8, 0.8, 0.8, 0.81, policy="cpu")
    found = verdict(won, race(policy="cpu"))
    assert found.settled and found.won == won and found.open is None
    said = r"split is 1\.34× as fast as llama\.cpp's placement here \(1\.\d\d-1\.\d\d\); used from now on"
    assert re.fullmatch(said, found.sentence)
    unsettled = verdict(race(promised=1.53), lost)
    assert not unsettled.settled and unsettled.open == unsettled.races[0]
    assert unsettled.sentence == "using llama.cpp's placement; split may be 1.5× faster"
    assert " so far (" in verdict(race(1.5, 0.9, 1.2, 1.3, promised=1.5)).sentence
    assert verdict(race()).sentence.endswith("split is not yet distinguishable from it")
    assert verdict(lost).settled
    assert verdict(lost).sentence.startswith("llama.cpp's placement stays: the CPU alone is 0.80× as fast here (0.")
    assert "not measurably faster" in verdict(race(*[1.0, 1.01] * 10)).sentence
    assert verdict().sentence == "llama.cpp's placement stays: nothing to compare it with"
    assert verdict(race(refused="no room")).sentence == "llama.cpp's placement stays: no room"


def test_short_tests_stand_for_the_workload():
    assert weighted_seconds(2.0, 1.0, BenchTest(64, 16), 512, 160) == pytest.approx(2.0 * 8 + 1.0 * 10)
