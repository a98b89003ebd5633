"""An answer: what decides its draw, the texts that end it, its record and times, and turns on an engine."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import UsageError
from oallama.run.generate import Piece, Stops, generation_of
from oallama.run.sampler import Sampling, grammar_of_schema
from oallama.run.stream import Turns


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"temperature": -1}, "--temp"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 1.1}, "--top-p"),
        ({"min_p": float("nan")}, "--min-p"),
        ({"repeat_penalty": 0}, "--repeat-penalty"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(value, says):
    with pytest.raises(UsageError, match=says):
        Sampling(**value)


@pytest.mark.parametrize("schema", ["{", "[1]", "1", '{"$ref": "https://example.com/x"}', '{"type": "nonsense"}'])
def test_what_is_no_schema_is_said(schema):
    with pytest.raises(UsageError, match="JSON schema") as said:
        grammar_of_schema(schema)
    assert "\n" not in str(said.value)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_what_is_shown_is_the_text_up_to_the_first_stop_wherever_pieces_are_cut(text, texts, data):
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
    elif len(texts) == 1:
        assert shown == text[: ends[0]]


def test_text_comes_as_soon_as_it_can_be_no_beginning_of_a_stop():
    stops = Stops(["END"])
    assert [stops.shown(piece) for piece in ("a", "bE", "N", "d", "EN")] == ["a", "b", "", "ENd", ""]
    assert stops.rest() == "EN"
    assert Stops("END").shown("theENDof") == "the", "one text may stand alone"
    with pytest.raises(UsageError, match="--stop is empty"):
        Stops([""])


def test_tpot_is_the_mean_of_the_times_between_tokens():
    """Four tokens have three times between them; what is left of a character at the end is no token."""
    made = [Piece(7, "a", 10.5), Piece(8, "", 10.7), Piece(9, "b", 11.0), Piece(10, "c", 11.1), Piece(None, "d", 12.0)]
    found = generation_of(made, n_prompt=5, start_s=10.0)
    assert (found.text, found.tokens, found.n_prompt, found.n_gen) == ("abcd", (7, 8, 9, 10), 5, 4)
    assert (found.ttft_s, found.tpot_s) == (pytest.approx(0.5), pytest.approx(0.2))
    for few, n_gen in (([Piece(None, "", 11.0)], 0), ([Piece(1, "a", 11.0)], 1)):
        found = generation_of(few, n_prompt=1, start_s=10.0)
        assert (found.n_gen, found.ttft_s, found.tpot_s) == (n_gen, 1.0, 0.0), "no time between them"


# ---- turns on an engine: calls wait for each other, none begins once it is closed


def stream(turns):
    with turns.next(), turns.taken():
        yield


def call(turns, begun=None):
    lock = turns.next()
    if begun is not None:
        begun.set()
    with lock, turns.taken():
        return "had its turn"


def test_another_threads_call_waits_for_its_turn_even_while_it_is_closed():
    turns, begun = Turns(), threading.Event()
    read = stream(turns)
    next(read)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call, turns, begun)
        assert begun.wait(60) and not waiting.done()
        with pytest.raises(UsageError, match="another thread"):
            turns.close()
        read.close()
        assert waiting.result(60) == "had its turn"
    late = turns.next()
    turns.close()
    for begin in (lambda: late, turns.next):
        with pytest.raises(UsageError, match="closed"), begin(), turns.taken():
            pass
    turns.close()


def test_a_turn_may_be_given_back_by_another_thread():
    turns = Turns()
    read = stream(turns)
    next(read)
    with pytest.raises(UsageError, match="still generating"):
        turns.next()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(read.close).result(60)
    assert call(turns) == "had its turn"
