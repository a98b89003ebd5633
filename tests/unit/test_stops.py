"""Texts that end a generation are found wherever pieces are cut, and nothing of them is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import UsageError
from oallama.run.generate import Stops


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_what_is_shown_is_the_text_up_to_the_first_of_them(text, texts, data):
    stops, shown, rest = Stops(texts), "", text
    while rest and not stops.reached:
        n = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + stops.shown(rest[:n]), rest[n:]
    shown += stops.rest()
    ends = [at for at in (text.find(stop) for stop in texts) if at >= 0]
    assert stops.reached == bool(ends)
    assert not any(stop in shown for stop in texts)
    assert text.startswith(shown)
    if not ends:
        assert shown == text
    if len(texts) == 1 and ends:
        assert shown == text[: ends[0]]


def test_text_comes_as_soon_as_it_can_be_no_beginning():
    stops = Stops(["END"])
    assert [stops.shown(piece) for piece in ("a", "bE", "N", "d", "EN")] == ["a", "b", "", "ENd", ""]
    assert stops.rest() == "EN"


def test_one_text_may_stand_alone_and_none_may_be_empty():
    assert Stops("END").shown("theENDof") == "the"
    with pytest.raises(UsageError, match="--stop is empty"):
        Stops([""])
