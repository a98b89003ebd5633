"""Finding the best -ngl, the largest that fits, --fit under a cap on weights, and a user's own flags."""

from __future__ import annotations

import math

import pytest
from bench_cases import N_LAYER, OPERATORS
from hypothesis import given
from hypothesis import strategies as st

from oallama.bench.search import best_value, largest_that_fits
from oallama.run.fit import shrink_until_fits
from oallama.run.stock import Cap, StockPlacement, operator_bytes_on_device


@given(st.integers(0, 100), st.integers(-1, 101))
def test_the_largest_that_fits(high: int, limit: int) -> None:
    expected = None if limit < 0 else min(limit, high)
    assert largest_that_fits(0, high, lambda value: value <= limit) == expected


@given(st.integers(0, 81), st.integers(0, 81))
def test_the_best_of_one_valley_is_found_with_few_measurements(high: int, valley: int) -> None:
    best, measured = best_value(0, high, lambda value: 1.0 + abs(value - valley))
    assert best == min(valley, high)
    assert len(measured) <= 7 + 3 * math.log2(high + 1)
    assert {0, high} <= measured.keys()


def layers_that_fit(offered: int) -> StockPlacement:
    """A --fit for OPERATORS: output 3000, then 2000 a layer, and 500 of compute buffers."""
    n = 0
    while n <= N_LAYER and 500 + operator_bytes_on_device(OPERATORS, N_LAYER, StockPlacement(n + 1)) <= offered:
        n += 1
    return StockPlacement(n)


def test_fit_is_asked_once_where_the_cap_on_weights_is_no_matter() -> None:
    placement, steps = shrink_until_fits(layers_that_fit, Cap(5500), 10_000, OPERATORS, N_LAYER)
    assert placement.n_gpu_layers == 2
    assert [step.offered_bytes for step in steps] == [5500]


@pytest.mark.parametrize(("limit", "n_gpu_layers"), [(7000, 3), (6999, 2), (5000, 2), (4999, 1), (3000, 1), (2999, 0)])
def test_fit_is_offered_less_until_its_weights_keep_to_the_cap(limit: int, n_gpu_layers: int) -> None:
    placement, steps = shrink_until_fits(layers_that_fit, Cap(None, limit), 1 << 30, OPERATORS, N_LAYER)
    assert placement.n_gpu_layers == n_gpu_layers
    assert operator_bytes_on_device(OPERATORS, N_LAYER, placement) <= limit
    assert steps[0].offered_bytes == 1 << 30
    assert len(steps) <= 8  # each is a dry load
