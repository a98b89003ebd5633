"""The colours of affinity: readable letters on each, and lightness alone tells the order."""

import re
from itertools import pairwise

import pytest

from oallama.report.layout import N_STEPS, step
from oallama.report.page import TEMPLATES

CSS = (TEMPLATES / "scale.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--(\w+):(#\w{6})", part)) for part in CSS.split("@media"))


def luminance(colour):
    """WCAG's relative luminance of #rrggbb."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    darker, brighter = sorted((luminance(one), luminance(other)))
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize(("scale", "page"), [(LIGHT, "#ffffff"), (DARK, "#171c22")], ids=["light", "dark"])
def test_every_step_can_be_told_and_read(scale, page):
    assert set(scale) == {f"{kind}{i}" for kind in "qi" for i in range(N_STEPS)}
    assert all(f".q{i}{{--fill:var(--q{i});--ink-on-fill:var(--i{i})}}" in CSS for i in range(N_STEPS))
    assert all(contrast(scale[f"q{i}"], scale[f"i{i}"]) >= 4.5 for i in range(N_STEPS))
    from_page = [contrast(scale[f"q{i}"], page) for i in range(N_STEPS)]
    assert all(more > 1.05 * less for less, more in pairwise(from_page)) and from_page[-1] > 7


def test_a_step_is_the_nearest_one():
    last = N_STEPS - 1
    assert [step(value) for value in (-1, 0, 0.4 / last, 0.6 / last, 0.5, 1, 2)] == [0, 0, 0, 1, last // 2, last, last]
