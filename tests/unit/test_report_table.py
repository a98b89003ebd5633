"""Tables: alignment, Markdown that cannot be broken out of, CSV that reads back."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.report.table import comma_separated, markdown, plain, table


def test_plain_tables_line_up():
    text = plain(table("Title", "name |>bytes", [("a", "1"), ("longer", "1000")], ["A sentence."]))
    assert text == "Title\nname    bytes\n------  -----\na           1\nlonger   1000\nA sentence.\n"


def test_a_table_of_a_width_closes_up_and_wraps_its_sentences():
    text = plain(table("A title of it", "one |two", [("12345", "6789")], ["A sentence here."], width=10))
    assert text == "A title of\nit\none   two\n----- ----\n12345 6789\nA sentence\nhere.\n"


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table("t", "a |b", [("only",)])


def test_markdown_cells_cannot_leave_their_cell():
    text = markdown(table("T", "a |>b", [("x|y", "<img src=x>`code`")]))
    assert text == "## T\n\n| a | b |\n| --- | ---: |\n| x\\|y | &lt;img src=x&gt;\\`code\\` |\n"


@given(st.lists(st.tuples(st.text(alphabet=st.characters(exclude_characters="\r\x00")), st.floats(allow_nan=False))))
def test_csv_reads_back_exactly(rows):
    text = comma_separated(["name", "value"], rows)
    read = list(csv.reader(io.StringIO(text, newline="")))
    assert read[0] == ["name", "value"]
    assert [(name, float(value)) for name, value in read[1:]] == rows
