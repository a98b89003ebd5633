"""The statistics of comparisons, on synthetic samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.bench.stats import (
    LEAST_PAIRS,
    block_drift,
    speed_ratio,
    student_t,
)

TIMES = st.floats(1e-6, 1e3)


def noisy(seconds: float, n: int, seed: int, sigma: float = 0.03) -> list[float]:
    return [float(s) for s in seconds * np.exp(np.random.default_rng(seed).normal(0, sigma, n))]


@pytest.mark.parametrize(("truth", "n"), [(1.0, 6), (1.0, 20), (1.34, 8), (0.8, 12)])
def test_the_interval_holds_the_truth_in_about_95_of_100_cases(truth: float, n: int) -> None:
    runs = 300
    inside = 0
    for seed in range(runs):
        ratio = speed_ratio(noisy(truth, n, 2 * seed), noisy(1.0, n, 2 * seed + 1), resamples=1000, seed=seed)
        assert ratio is not None
        inside += ratio.low <= truth <= ratio.high
    assert 0.91 <= inside / runs <= 0.99


def test_too_few_pairs_give_no_interval() -> None:
    assert speed_ratio([1.0] * (LEAST_PAIRS - 1), [1.0] * (LEAST_PAIRS - 1)) is None
    assert speed_ratio([1.0] * LEAST_PAIRS, [1.0] * LEAST_PAIRS) is not None


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, math.nan], [1.0, 1.0])])
def test_what_is_no_pair_of_times_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|positive"):
        speed_ratio(a, b)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=LEAST_PAIRS, max_size=12))
def test_swapping_the_arms_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    there, back = speed_ratio(a, b, resamples=200), speed_ratio(b, a, resamples=200)
    assert there is not None
    assert back is not None
    assert there.low <= there.value <= there.high
    assert there.value * back.value == pytest.approx(1.0, rel=1e-9)


def test_a_block_that_the_machine_changed_in_shows_it() -> None:
    assert block_drift([(1.0, 1.0), (2.0, 2.0)]) == 0
    assert block_drift([(1.0, 1.2), (2.0, 2.4), (5.0, 6.0)]) == pytest.approx(0.2)
    assert block_drift([(1.2, 1.0), (2.4, 2.0), (6.0, 5.0)]) == pytest.approx(0.2)  # whichever way
    assert block_drift([(1.0, 9.0), (2.0, 2.0), (5.0, 5.0)]) == 0  # one arm's hiccup is not the machine's
    with pytest.raises(ValueError, match="arm"):
        block_drift([])


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.57058), (9, 2.26216), (30, 2.04227)])
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(quantile, rel=0.002)
