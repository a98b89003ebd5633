"""The colour scales are perceptually uniform, readable, and do not need hue."""

from itertools import pairwise
from math import dist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.report.colour import DARK, LIGHT, N_STEPS, contrast, from_oklab, step, stylesheet, to_oklab

SCALES = pytest.mark.parametrize("scale", [LIGHT, DARK], ids=["light", "dark"])
VALUES = [i / (N_STEPS - 1) for i in range(N_STEPS)]


@SCALES
def test_equal_steps_of_affinity_are_equal_steps_of_colour(scale):
    steps = [dist(to_oklab(scale.colour(a)), to_oklab(scale.colour(b))) for a, b in pairwise(VALUES)]
    mean = sum(steps) / len(steps)
    assert all(abs(s - mean) < 0.15 * mean for s in steps)  # what rounding to 8 bits leaves


@SCALES
def test_lightness_alone_tells_the_order(scale):
    lightness = [to_oklab(scale.colour(value))[0] for value in VALUES]
    rises = [b - a for a, b in pairwise(lightness)]
    assert all(r > 0.015 for r in rises) or all(r < -0.015 for r in rises)


@SCALES
def test_letters_can_be_read_on_every_step(scale):
    assert all(contrast(scale.colour(value), scale.ink(value)) >= 4.5 for value in VALUES)


def test_high_affinity_stands_out_from_its_page():
    assert contrast(LIGHT.colour(1), "#ffffff") > 7
    assert contrast(DARK.colour(1), "#171c22") > 7


def test_known_colours():
    lightness, a, b = to_oklab("#ffffff")
    assert (lightness, a, b) == pytest.approx((1, 0, 0), abs=1e-6)
    assert to_oklab("#ff0000") == pytest.approx((0.62796, 0.22486, 0.12585), abs=1e-4)  # Ottosson's published value
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@given(st.integers(0, 0xFFFFFF))
def test_oklab_and_back_is_the_same_colour(rgb):
    colour = f"#{rgb:06x}"
    back = from_oklab(to_oklab(colour))
    assert all(abs(int(colour[i : i + 2], 16) - int(back[i : i + 2], 16)) <= 1 for i in (1, 3, 5))


@given(st.floats(-1, 2))
def test_a_step_is_the_nearest_one(value):
    index = step(value)
    clamped = min(1, max(0, value))
    assert 0 <= index < N_STEPS
    assert abs(VALUES[index] - clamped) <= 0.5 / (N_STEPS - 1) + 1e-9


def test_the_stylesheet_has_every_step_in_both_schemes():
    css = stylesheet()
    assert all(css.count(f"--q{i}:") == 2 and f".q{i}{{" in css for i in range(N_STEPS))
