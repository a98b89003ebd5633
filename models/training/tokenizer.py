"""Byte-level BPE as in GPT-2 (Sennrich et al. 2016; Radford et al. 2019): training, encoding, decoding.

llama.cpp reads it as tokenizer.ggml.model = "gpt2", tokenizer.ggml.pre = "gpt-2", and must give the same ids.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# GPT-2's pattern with re's \w in the place of \p{L} and \p{N}: equal on ASCII, which is all that the corpus has.
PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
BEGIN, END_OF_TEXT = "<|begin|>", "<|endoftext|>"
Pair = tuple[str, str]


def byte_letters() -> list[str]:
    """The printable character that stands for each byte 0..255: itself where printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


def letters(text: str) -> tuple[str, ...]:
    """The letters of a text's UTF-8 bytes."""
    return tuple(LETTERS[byte] for byte in text.encode())


@dataclass
class Tokenizer:
    """tokens: every token's letters (or, for the marks at the end, its text), by id; merges: best first."""

    tokens: list[str]
    merges: list[Pair]
    marks: tuple[str, ...]
    _cache: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._ranks = {pair: i for i, pair in enumerate(self.merges)}
        self._marks = re.compile("(" + "|".join(re.escape(mark) for mark in self.marks) + ")")

    @classmethod
    def train(cls, texts: Iterable[str], n_vocab: int, marks: Sequence[str]) -> Tokenizer:
        """Merge the most frequent pair (ties: the smaller) until there are n_vocab tokens or nothing occurs twice."""
        split = re.compile("|".join(re.escape(mark) for mark in marks))
        counts = Counter(piece for text in texts for part in split.split(text) for piece in PIECES.findall(part))
        words = {letters(piece): n for piece, n in counts.items()}
        tokens, merges = list(LETTERS), []
        while len(tokens) + len(marks) < n_vocab:
            pairs: Counter[Pair] = Counter()
            for word, n in words.items():
                for pair in pairwise(word):
                    pairs[pair] += n
            best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
            if best is None or pairs[best] < 2:
                break
            merges.append(best)
            tokens.append("".join(best))
            words = {merged(word, best): n for word, n in words.items()}
        return cls(tokens + list(marks), merges, tuple(marks))

    def id_of(self, token: str) -> int:
        """Id of a token or mark."""
        return self._ids[token]

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which marks stand for themselves; no begin mark is added."""
        ids: list[int] = []
        for part in self._marks.split(text):
            if part in self.marks:
                ids.append(self._ids[part])
            else:
                for piece in PIECES.findall(part):
                    ids.extend(self._encode_piece(piece))
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        if piece not in self._cache:
            word = letters(piece)
            while True:
                known = [pair for pair in pairwise(word) if pair in self._ranks]
                if not known:
                    break
                word = merged(word, min(known, key=self._ranks.__getitem__))
            self._cache[piece] = [self._ids[token] for token in word]
        return self._cache[piece]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        data = bytearray()
        for i in ids:
            token = self.tokens[i]
            data += token.encode() if token in self.marks else bytes(BYTES[letter] for letter in token)
        return data.decode(errors="replace")


def merged(word: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    """The word with each occurrence of the pair, from the left, made one token."""
    if pair[0] not in word:
        return word
    out: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)
