"""t = alpha + beta * bytes recovered from points."""

from __future__ import annotations

import pytest

from oallama.profile.fit import fit_linear
from oallama.profile.link import line_over

SIZES = [4096 * 4**i for i in range(7)]


def test_a_falling_line_becomes_a_constant_and_a_negative_latency_zero() -> None:
    falling = fit_linear([(1000, 2.0), (2000, 1.0)])
    assert falling.beta_s_per_byte == 0
    assert 1.0 < falling.alpha_s < 2.0
    steep = fit_linear([(1000, 1.0), (2000, 3.0)])
    assert steep.alpha_s == 0
    assert 1.0 <= steep.seconds(1000) <= 1.5


@pytest.mark.parametrize("points", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)]])
def test_points_without_a_line_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError):
        fit_linear(points)


@pytest.mark.parametrize("wild", [0.0, 1e-9, -2e-5, 1e-2])
@pytest.mark.parametrize("where", range(7))
def test_one_wild_point_does_not_carry_the_others_with_it(wild: float, where: int) -> None:
    line = [(size, 20e-6 + 1e-9 * size) for size in SIZES]
    fit = fit_linear([(size, wild if i == where else seconds) for i, (size, seconds) in enumerate(line)])
    others = [point for i, point in enumerate(line) if i != where]
    off = [abs(fit.seconds(size) / seconds - 1) for size, seconds in others]
    assert sorted(off)[3] < 0.15  # most of them
    assert fit.r2 < 1


def test_points_far_from_their_line_are_measured_again_and_the_least_counts() -> None:
    true_s = {4096: 1e-3, 65536: 1.1e-3, 1 << 20: 2e-3, 8 << 20: 9e-3}
    disturbed = {1 << 20: 2.0, 8 << 20: 0.4}
    asked: list[int] = []

    def seconds_of(size: int) -> float:
        asked.append(size)
        return disturbed.pop(size, true_s[size])

    fit = line_over(tuple(true_s), seconds_of, slow_s=10.0)
    assert fit == fit_linear(tuple(true_s.items())) and asked == 2 * list(true_s)
    assert line_over(tuple(true_s), seconds_of, slow_s=10.0) == fit and len(asked) == 12, "once where nothing is far"
