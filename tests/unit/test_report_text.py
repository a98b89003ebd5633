"""Small texts: what a model file says never steers a terminal, and ranges and shares say what is true."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.report.text import percent, plural, printable, ranges_text, rate_text, shape_text, signed, three_digits


@given(st.text())
def test_printable_text_has_nothing_invisible_in_it(text):
    shown = printable(text)
    assert len(shown) <= 200 * 10
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)


def test_printable_keeps_ordinary_text_and_shows_the_rest_as_escapes():
    assert printable("blk.0.ffn_down.weight µ 模型") == "blk.0.ffn_down.weight µ 模型"
    assert printable("a\x1b[31mb\u202ec\n") == "a\\x1b[31mb\\u202ec\\x0a"
    assert printable("x" * 300, 10) == "x" * 9 + "…"


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_numbers(numbers):
    named = set()
    for part in ranges_text(numbers).split(", ") if numbers else []:
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


def test_ranges_are_as_short_as_they_can_be():
    assert ranges_text([3, 1, 2, 2, 7, 9, 8]) == "1-3, 7-9"
    assert ranges_text([]) == ""


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 5, "0%"), (1, 3, "33%"), (5, 5, "100%"), (1, 5000, "<1%"), (4999, 5000, ">99%"), (0, 0, "-")],
)
def test_percent_never_claims_all_or_nothing_wrongly(part, whole, text):
    assert percent(part, whole) == text


def test_numbers_keep_about_three_digits_and_no_exponent():
    assert [three_digits(x) for x in (12345.6, 45.25, -1.234, 0.01234, 0.0)] == [
        "12,346",
        "45.2",
        "-1.23",
        "0.012",
        "0.000",
    ]


def test_signs_and_rates():
    assert [signed(x) for x in (12345.6, -1.234, 0.0)] == ["+12,346", "-1.23", "0"]
    assert [rate_text(x) for x in (0.000826, 0.0318, 0.0)] == ["1,211 tokens/s", "31.4 tokens/s", "-"]


def test_shapes_and_plurals():
    assert shape_text((4096, 14336, 1)) == "4096×14336"
    assert shape_text((768, 2048, 128)) == "768×2048×128"
    assert (plural(1, "layer"), plural(2, "layer")) == ("1 layer", "2 layers")
