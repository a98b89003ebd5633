"""How many times as fast: intervals of comparisons, on samples whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.bench.stats import LEAST_PAIRS, round_drift, speed_ratio, student_t

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
    assert round_drift([(1.0, 1.0), (2.0, 2.0)]) == 0
    assert round_drift([(1.0, 1.2), (2.0, 2.4), (5.0, 6.0)]) == pytest.approx(0.2)
    assert round_drift([(1.2, 1.0), (2.4, 2.0), (6.0, 5.0)]) == pytest.approx(0.2)  # whichever way
    assert round_drift([(1.0, 9.0), (2.0, 2.0), (5.0, 5.0)]) == 0  # one arm's hiccup is not the machine's
    with pytest.raises(ValueError, match="arm"):
        round_drift([])


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.57058), (9, 2.26216), (30, 2.04227)])
def test_students_t_is_that_of_the_tables(freedom, quantile):
    assert student_t(0.975, freedom) == pytest.approx(quantile, rel=0.002)
