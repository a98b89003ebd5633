"""t = alpha + beta * bytes recovered from points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.profile.fit import fit_linear

SIZES = [4096 * 4**i for i in range(7)]


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_exact_points_give_back_their_line(alpha: float, beta: float) -> None:
    fit = fit_linear([(size, alpha + beta * size) for size in SIZES])
    for size in SIZES:
        assert fit.seconds(size) == pytest.approx(alpha + beta * size, rel=1e-6)
    assert fit.r2 == pytest.approx(1.0, abs=1e-6)
    assert [size for size, _ in fit.points] == SIZES


@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.lists(st.floats(0.95, 1.05), min_size=7, max_size=7))
def test_noise_of_5_percent_moves_no_prediction_much(alpha: float, beta: float, noise: list[float]) -> None:
    points = [(size, (alpha + beta * size) * factor) for size, factor in zip(SIZES, noise, strict=True)]
    fit = fit_linear(points)
    assert fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0 and fit.r2 <= 1
    for size in SIZES:
        assert fit.seconds(size) == pytest.approx(alpha + beta * size, rel=0.2)


def test_small_messages_count_as_much_as_large_ones() -> None:
    # 10 us at 4 KiB; an unweighted fit would let 3 % of 16 MiB's 1.6 ms (50 us) swallow it
    points = [(4096, 10e-6), (65536, 16e-6), (1 << 20, 110e-6), (16 << 20, 1.65e-3)]
    fit = fit_linear(points)
    assert fit.seconds(4096) == pytest.approx(10e-6, rel=0.05)
    assert fit.seconds(16 << 20) == pytest.approx(1.65e-3, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-7, 10.0)), min_size=2, unique_by=lambda p: p[0]))
def test_neither_term_is_ever_negative(points: list[tuple[int, float]]) -> None:
    fit = fit_linear(points)
    assert fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0
    assert fit == fit_linear(points[::-1])


def test_a_falling_line_becomes_a_constant_and_a_negative_latency_zero() -> None:
    falling = fit_linear([(1000, 2.0), (2000, 1.0)])
    assert falling.beta_s_per_byte == 0
    assert 1.0 < falling.alpha_s < 2.0
    steep = fit_linear([(1000, 1.0), (2000, 3.0)])
    assert steep.alpha_s == 0
    assert 1.0 <= steep.seconds(1000) <= 1.5


@pytest.mark.parametrize(
    "points", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (16, 0.0)], [(8, -1.0), (16, 1.0)]]
)
def test_points_without_a_line_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError):
        fit_linear(points)
