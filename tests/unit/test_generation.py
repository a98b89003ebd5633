"""The record of an answer: its text, and the times of its tokens."""

from __future__ import annotations

import pytest

from oallama.run.generate import Piece, generation_of


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
