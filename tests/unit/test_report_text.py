"""Tables and small texts: what a model file says never steers a terminal, breaks no table, and ranges and shares say
what is true."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import model_info

from oallama.report.table import plain, table
from oallama.report.text import (
    model_title,
    percent,
    plural,
    printable,
    ranges_text,
    rate_text,
    shape_text,
    signed,
    three_digits,
)


@given(st.text())
def test_printable_text_has_nothing_invisible_in_it(text):
    shown = printable(text)
    assert len(shown) <= 200 * 10
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_numbers(numbers):
    named = set()
    for part in ranges_text(numbers).split(", ") if numbers else []:
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (printable("blk.0.ffn_down.weight µ 模型"), "blk.0.ffn_down.weight µ 模型"),
        (printable("a\x1b[31mb\u202ec\n"), "a\\x1b[31mb\\u202ec\\n"),
        (printable("x" * 300, 10), "x" * 9 + "…"),
        (ranges_text([3, 1, 2, 2, 7, 9, 8]), "1-3, 7-9"),
        (ranges_text([]), ""),
        (percent(0, 5), "0%"),
        (percent(1, 3), "33%"),
        (percent(5, 5), "100%"),
        (percent(1, 5000), "<1%"),
        (percent(4999, 5000), ">99%"),
        (percent(0, 0), "-"),
        (three_digits(12345.6), "12,346"),
        (three_digits(45.25), "45.2"),
        (three_digits(-1.234), "-1.23"),
        (three_digits(0.01234), "0.012"),
        (three_digits(0.0), "0.000"),
        (signed(12345.6), "+12,346"),
        (signed(-1.234), "-1.23"),
        (signed(0.0), "0"),
        (rate_text(0.000826), "1,211 tokens/s"),
        (rate_text(0.0318), "31.4 tokens/s"),
        (rate_text(0.0), "-"),
        (shape_text((4096, 14336, 1)), "4096×14336"),
        (shape_text((768, 2048, 128)), "768×2048×128"),
        (plural(1, "layer"), "1 layer"),
        (plural(2, "layer"), "2 layers"),
        (
            plain(table("Title", "name |>bytes", [("a", "1"), ("longer", "1000")], ["A sentence."])),
            "Title\nname    bytes\n------  -----\na           1\nlonger   1000\nA sentence.\n",
        ),
        (
            plain(table("t" * 79 + " it", "one |two", [("w" * 72 + " x y", "6789")], ["s" * 78 + " here."])),
            f"{'t' * 79}\nit\none{' ' * 73}two\n{'-' * 75} ----\n{'w' * 72} x  6789\ny\n{'s' * 78}\nhere.\n",
        ),
    ],
)
def test_small_texts(shown, text):
    assert shown == text


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table("t", "a |b", [("only",)])


@pytest.mark.parametrize(
    ("name", "title"), [("Llama 3", "Llama 3"), ("", "b.gguf"), ("  ", "b.gguf"), ("a\x1b[2J", "a\\x1b[2J")]
)
def test_a_model_without_a_name_goes_by_its_file(name, title):
    assert model_title(model_info(name=name, path="/a/b.gguf")) == title
