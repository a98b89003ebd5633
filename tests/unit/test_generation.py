"""Texts that end a generation: found wherever pieces are cut, never shown. The record of an answer and its times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import UsageError
from oallama.run.generate import Piece, Stops, generation_of


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


def test_tpot_is_the_mean_of_the_times_between_tokens() -> None:
    """Four tokens have three times between them; what is left of a character at the end is no token."""
    made = [Piece(7, "a", 10.5), Piece(8, "", 10.7), Piece(9, "b", 11.0), Piece(10, "c", 11.1), Piece(None, "d", 12.0)]
    found = generation_of(made, n_prompt=5, start_s=10.0)
    assert (found.text, found.tokens, found.n_prompt, found.n_gen) == ("abcd", (7, 8, 9, 10), 5, 4)
    assert found.ttft_s == pytest.approx(0.5)
    assert found.tpot_s == pytest.approx(0.2)


@pytest.mark.parametrize(("made", "n_gen"), [([Piece(None, "", 11.0)], 0), ([Piece(1, "a", 11.0)], 1)])
def test_fewer_than_two_tokens_have_no_time_between_them(made: list[Piece], n_gen: int) -> None:
    found = generation_of(made, n_prompt=1, start_s=10.0)
    assert (found.n_gen, found.ttft_s, found.tpot_s) == (n_gen, 1.0, 0.0)
