"""Which lines make a message, and messages out of a pipe."""

import io

import pytest

from oallama.cli.chat.commands import PipedLines, message_of
from oallama.core.errors import UsageError


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello", "hello"),
        ("", ""),
        ("two\nlines", "two\nlines"),  # pasted
        ('"""one line"""', "one line"),
        ('"""\nfirst\nsecond\n"""', "first\nsecond"),
        ('  """first\nsecond"""  ', "first\nsecond"),
        ('"""', None),
        ('"""first\nsecond', None),
        ('""""""', ""),
        ("first\\", None),
        ("first\\\nsecond", "first\nsecond"),
        ("first\\\nsecond\\", None),
        ('not at the """ beginning', 'not at the """ beginning'),
        ('/set system """a\nb', None),
        ('/set system """a\nb"""', '/set system """a\nb"""'),
    ],
)
def test_lines_of_a_message(typed, message):
    assert message_of(typed) == message


@pytest.mark.parametrize(
    ("typed", "message"),
    [('"""first\nsecond', "first\nsecond"), ("first\\", "first"), ('/set system """a', '/set system """a')],
)
def test_at_the_end_of_the_input_nothing_is_waited_for(typed, message):
    assert message_of(typed, at_end=True) == message


def test_a_pipe_is_read_line_by_line():
    lines = PipedLines(io.StringIO('one\n\n"""two\nthree"""\nfour\\\nfive\n"""six'))
    assert [lines.read() for _ in range(7)] == ["one", "", "two\nthree", "four\nfive", "six", None, None]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_is_no_text_is_said(errors):
    with pytest.raises(UsageError, match="not UTF-8"):
        PipedLines(io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8", errors)).read()
