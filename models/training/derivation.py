"""Derivations of a probabilistic grammar: sampling one, and finding every one that yields a given text.

A grammar is a function `grammar(d)` that asks `d.pick(...)` for each random choice and `d.write(...)` for each piece
of text. Sampling records -log p of every choice, so a document comes with the exact probability of its derivation.
`find_derivations` runs the same grammar over a finished text and returns all derivations of it; where that is always
one, -log p(derivation) is -log p(text), and its mean over documents is the entropy of the grammar: no model of these
texts can have a lower expected cross-entropy (Gibbs' inequality).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Protocol, TypeVar

T = TypeVar("T")
Slots = Mapping[str, object]


class Derivation(Protocol):
    """What a grammar may do."""

    def pick(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        """Choose one option with probability weight / sum of weights (uniform without weights)."""
        ...

    def write(self, text: str) -> None:
        """Append text to the document."""
        ...


def say(d: Derivation, *templates: str, **slots: object) -> dict[str, str]:
    """Write one of the templates (uniform); a slot given as a tuple is one of its words (uniform). Returns the words.

    Slots are chosen in the order in which the text shows them, so that a parser can reject a wrong one at once.
    """
    used: dict[str, str] = {}
    for literal, name, _, _ in Formatter().parse(d.pick(templates)):
        d.write(literal)
        if name is not None:
            if name not in used:
                value = slots[name]
                used[name] = d.pick(value) if isinstance(value, tuple) else str(value)
            d.write(used[name])
    return used


class Sampler:
    """Draws a derivation with a seeded generator; `nats` is -log p of all choices so far."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self._pieces: list[str] = []
        self.nats = 0.0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def pick(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        if weights is None:
            index = int(self._random.random() * len(options))
            self.nats += math.log(len(options))
            return options[index]
        total = math.fsum(weights)
        point, index = self._random.random() * total, 0
        while point >= weights[index] and index < len(options) - 1:
            point -= weights[index]
            index += 1
        self.nats -= math.log(weights[index] / total)
        return options[index]

    def write(self, text: str) -> None:
        self._pieces.append(text)


class _Mismatch(Exception):
    """The derivation writes something that the text does not have there."""


class _Open(Exception):
    """The forced choices are used up: `probabilities` lists those of the next choice."""

    def __init__(self, probabilities: list[float]) -> None:
        self.probabilities = probabilities


class _Replay:
    """Runs a grammar with forced choices against a text."""

    def __init__(self, text: str, choices: Sequence[int]) -> None:
        self._text, self._choices, self._at = text, choices, 0
        self.position = 0

    def pick(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        if self._at == len(self._choices):
            parts = [1.0] * len(options) if weights is None else list(weights)
            raise _Open([part / sum(parts) for part in parts])
        self._at += 1
        return options[self._choices[self._at - 1]]

    def write(self, text: str) -> None:
        if not self._text.startswith(text, self.position):
            raise _Mismatch
        self.position += len(text)


def find_derivations(grammar: Callable[[Derivation], object], text: str) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every derivation of exactly this text: (indices of the choices, probability). Depth-first, exhaustive."""
    open_paths: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_paths:
        choices, probability = open_paths.pop()
        replay = _Replay(text, choices)
        try:
            grammar(replay)
        except _Mismatch:
            continue
        except _Open as choice:
            open_paths.extend(((*choices, i), probability * p) for i, p in enumerate(choice.probabilities) if p > 0)
            continue
        if replay.position == len(text):
            yield choices, probability
