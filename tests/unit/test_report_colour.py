"""The colour scales are perceptually uniform, readable, and do not need hue."""

import re
from itertools import pairwise
from math import dist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.report.layout import N_STEPS, step
from oallama.report.page import TEMPLATES

CSS = (TEMPLATES / "scale.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--(\w+):(#\w{6})", part)) for part in CSS.split("@media"))
SCALES = pytest.mark.parametrize("scale", [LIGHT, DARK], ids=["light", "dark"])
VALUES = [i / (N_STEPS - 1) for i in range(N_STEPS)]


def to_oklab(colour):
    """#rrggbb (sRGB) to OKLab."""
    r, g, b = (linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def contrast(one, other):
    """WCAG 2 contrast ratio of two colours, 1..21."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour):
    r, g, b = (linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def linear(channel):
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


@SCALES
def test_equal_steps_of_affinity_are_equal_steps_of_colour(scale):
    labs = [to_oklab(scale[f"q{i}"]) for i in range(N_STEPS)]
    steps = [dist(a, b) for a, b in pairwise(labs)]
    mean = sum(steps) / len(steps)
    assert all(abs(s - mean) < 0.15 * mean for s in steps)  # what rounding to 8 bits leaves
    assert sum(steps) == pytest.approx(dist(labs[0], labs[-1]), rel=0.02)  # a straight line


@SCALES
def test_lightness_alone_tells_the_order(scale):
    lightness = [to_oklab(scale[f"q{i}"])[0] for i in range(N_STEPS)]
    rises = [b - a for a, b in pairwise(lightness)]
    assert all(r > 0.015 for r in rises) or all(r < -0.015 for r in rises)


@SCALES
def test_letters_can_be_read_on_every_step(scale):
    assert all(contrast(scale[f"q{i}"], scale[f"i{i}"]) >= 4.5 for i in range(N_STEPS))


def test_high_affinity_stands_out_from_its_page():
    assert contrast(LIGHT["q20"], "#ffffff") > 7
    assert contrast(DARK["q20"], "#171c22") > 7


def test_known_colours():
    lightness, a, b = to_oklab("#ffffff")
    assert (lightness, a, b) == pytest.approx((1, 0, 0), abs=1e-6)
    assert to_oklab("#ff0000") == pytest.approx((0.62796, 0.22486, 0.12585), abs=1e-4)  # Ottosson's published value
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@given(st.floats(-1, 2))
def test_a_step_is_the_nearest_one(value):
    index = step(value)
    clamped = min(1, max(0, value))
    assert 0 <= index < N_STEPS
    assert abs(VALUES[index] - clamped) <= 0.5 / (N_STEPS - 1) + 1e-9


def test_every_step_has_a_colour_in_both_schemes_and_a_class():
    names = {f"{kind}{i}" for kind in "qi" for i in range(N_STEPS)}
    assert set(LIGHT) == set(DARK) == names
    assert all(f".q{i}{{--fill:var(--q{i});--ink-on-fill:var(--i{i})}}" in CSS for i in range(N_STEPS))
