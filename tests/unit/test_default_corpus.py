"""The grammar behind the default model: its probabilities are exact, its stories consistent, its sums right."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

from training.derivation import Sampler, find_derivations
from training.documents import ASSISTANT, END, USER, document, sample_document
from training.sums import sum_question
from training.tokenizer import Tokenizer

MARKS = (USER, ASSISTANT, END)
SEED = 20261121


def test_same_seed_and_index_give_the_same_document() -> None:
    assert [sample_document(3, i) for i in range(20)] == [sample_document(3, i) for i in range(20)]
    assert len({sample_document(seed, i).text for seed in (3, 4) for i in range(40)}) > 70


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_text_has_one_derivation_with_the_stated_probability(seed: int, index: int) -> None:
    """Parsing the text alone, over all choices that could have led to it, finds one, as likely as the sampler said."""
    drawn = sample_document(seed, index)
    found = list(find_derivations(document, drawn.text))
    assert len(found) == 1
    assert -math.log(found[0][1]) == pytest.approx(drawn.nats, abs=1e-9)


def test_a_text_outside_the_grammar_has_no_derivation() -> None:
    text = next(d.text for d in (sample_document(SEED, i) for i in range(100)) if d.text.startswith("What is"))
    assert list(find_derivations(document, text.replace("What is", "What was", 1))) == []
    assert list(find_derivations(document, text[:-1])) == []


def test_bits_of_a_sum_worked_out_by_hand() -> None:
    """P(kind of document) P(opener) P(operation) P(a) P(b) P(nothing more)."""
    found = list(find_derivations(document, "What is 7 + 5?\n7 + 5 = 12.\n"))
    assert [p for _, p in found] == [pytest.approx(0.2 * 0.3 * 0.3 / 21 / 21 * 0.3)]
    greeting = f"{USER}\nHi!{END}\n{ASSISTANT}\nHello! Would you like a story or a sum?{END}\n"
    question = f"{USER}\nWhat is 9 - 2?{END}\n{ASSISTANT}\n9 - 2 = 7.{END}\n"
    found = list(find_derivations(document, greeting + question))
    assert [p for _, p in found] == [pytest.approx(0.45 * 0.1 / 3 * 0.5 * 0.25 / 21 / 10 * 0.3)]


def test_frequencies_agree_with_probabilities() -> None:
    """The sampler draws what it says it draws: kinds of sums within five standard deviations."""
    n = 4000
    counts: Counter[str] = Counter()
    for i in range(n):
        sampler = Sampler(f"{SEED}/{i}")
        sum_question(sampler)
        counts[next(sign for sign in (" + ", " - ", " times ", " gets ", " eats ") if sign in sampler.text)] += 1
    for sign, p in ((" + ", 0.3), (" - ", 0.25), (" times ", 0.15), (" gets ", 0.15), (" eats ", 0.15)):
        assert abs(counts[sign] - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_every_sum_is_right() -> None:
    checked = 0
    for i in range(600):
        text = sample_document(SEED, i).text
        for a, sign, b, result in re.findall(r"\n(\d+) ([-+]|times) (\d+) (?:=|is) (\d+)\.", text):
            assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "times": int(a) * int(b)}[sign]
            checked += 1
        for _name, a, _food, verb, b, result in re.findall(
            r"(\w+) has (\d+) (\w+) and (gets|eats) (\d+).*?(?:\n\S+)?\n?(?:Answer: )?\1 has (\d+) \3 now\.", text
        ):
            assert int(result) == (int(a) + int(b) if verb == "gets" else int(a) - int(b))
            checked += 1
        for mine, _, _, yours, both in re.findall(
            r"(?:She|He) had (\d+) ((\w+)) in a basket\..* was waiting with (\d+).*?(\d+) \3[.!]", text
        ):
            assert int(mine) + int(yours) == int(both)
            checked += 1
    assert checked > 500


def test_a_lost_thing_is_found_where_the_answer_says_and_keeps_its_colour() -> None:
    checked = 0
    for i in range(1500):
        text = sample_document(SEED, i).text
        story = re.search(r"They looked ([\w ]+), and there was the (\w+) (\w+)!", text)
        if story is None:
            continue
        place, colour, noun = story.groups()
        assert f"had a {colour} {noun}" in text
        assert f"looked {place}, but" not in text
        for answer in re.findall(rf"(?<=\n)(?:Answer: )?The {noun} was ([\w ]+)\.", text):
            assert answer in (place, colour)
            checked += 1
    assert checked > 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train((sample_document(1, i).text for i in range(400)), 600, MARKS)


def test_tokenizer_gives_back_every_document(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.tokens) == len(set(tokenizer.tokens)) == 600
    for i in range(100):
        text = sample_document(2, i).text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_tokenizer_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
