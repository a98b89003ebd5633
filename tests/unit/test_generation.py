"""An answer: what decides its draw, the texts that end it, its record and times."""

import pytest

from oallama.core.errors import UsageError
from oallama.run.answer import checked_stops, generation_of
from oallama.run.sampling import Sampling


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"temperature": -1}, "--temp"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 1.1}, "--top-p"),
        ({"min_p": float("nan")}, "--min-p"),
        ({"repeat_penalty": 0}, "--repeat-penalty"),
        ({"grammar": "root ::= [a]", "json_schema": "{}"}, "cannot be combined"),
        *(({"json_schema": text}, "JSON schema") for text in ("{", "[1]", "1", "[" * 100_000)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_that_cannot_be_are_refused(value, says):
    with pytest.raises(UsageError, match=says) as said:
        Sampling(**value)
    assert "\n" not in str(said.value)


def test_llama_server_is_asked_for_all_of_it():
    asked = Sampling(0.5, 7, 1, 0.9, 0.1, 1.2, json_schema='{"type": "object"}').request()
    assert asked == {
        "temperature": 0.5, "seed": 7, "top_k": 1, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2,
        "repeat_last_n": 64, "json_schema": {"type": "object"},
    }  # fmt: skip
    assert Sampling(grammar="root ::= [a]").request()["grammar"] == "root ::= [a]"


def test_stops_are_one_text_or_several():
    assert checked_stops("END") == ["END"] and checked_stops(("a", "b")) == ["a", "b"]
    for wrong in ("", ["a", ""], 5, [5]):
        with pytest.raises(UsageError, match="--stop"):
            checked_stops(wrong)


def told(n, ms, cached=0, prompt=5, **more):
    return {"timings": {"predicted_n": n, "predicted_ms": ms, "cache_n": cached, "prompt_n": prompt}, **more}


def test_tpot_is_the_mean_of_the_times_between_tokens():
    """Four tokens have three times between them."""
    found = generation_of(told(4, 600.0, cached=2, prompt=3, stop_type="limit"), "abcd", [7, 8, 9, 10], 1.1)
    assert (found.text, found.tokens, found.n_prompt, found.n_cached, found.n_gen) == ("abcd", (7, 8, 9, 10), 5, 2, 4)
    assert (found.ttft_s, found.tpot_s) == (pytest.approx(0.5), pytest.approx(0.2))
    few = generation_of(told(1, 0.0, stop_type="limit"), "a", [7], 1.0)
    assert (few.n_gen, few.ttft_s, few.tpot_s) == (1, 1.0, 0.0), "no time between them"


@pytest.mark.parametrize(
    ("said", "end", "n_gen"),
    [
        ({"stop_type": "eos"}, "model", 2), ({"stop_type": "none"}, "model", 3), ({"stop_type": "word"}, "stop", 3),
        ({"stop_type": "limit"}, "limit", 3), ({"stop_type": "limit", "truncated": True}, "context", 3),
    ],
)  # fmt: skip
def test_why_it_ended_and_the_token_that_ends_it_is_none_of_it(said, end, n_gen):
    found = generation_of(told(3, 600.0, **said), "ab", [7, 8, 2], 1.0)
    assert (found.end, found.n_gen, found.tokens) == (end, n_gen, (7, 8, 2)[:n_gen])
    assert found.tpot_s == pytest.approx(0.3)
