"""Timing a test on a live llama_context, as llama-bench does: fixed tokens, no sampling, every step waited for."""

from __future__ import annotations

import random
import time
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import oallama
from oallama.bench.records import BenchTest, Sample
from oallama.core.errors import DeviceError, UsageError
from oallama.run.vocabulary import tokenize

LEAST_S = 0.1
"""Shorter runs would measure the operating system's scheduler rather than the arm."""

MOST_RUNS = 50


def bench_tokens(n_tokens: int, n_vocab: int, first: int | None) -> list[int]:
    """The tokens of every position, the same for all arms: random ones of the vocabulary, after `first` (BOS)."""
    rng = random.Random(0)
    tokens = [rng.randrange(n_vocab) for _ in range(n_tokens)]
    if first is not None and tokens:
        tokens[0] = first
    return tokens


def text_tokens(n_tokens: int, vocab: Any, first: int | None) -> list[int]:
    """The tokens of every position, from a text (oallama's sources, repeated), after `first`. As in a conversation,
    neighbouring tokens use the same experts; random ones do not, so that caches of experts would look worse than they
    are. Raises UsageError for a model without a vocabulary."""
    folder = Path(oallama.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((folder / "core").glob("*.py")))
    tokens = tokenize(vocab, text, add_special=False)
    start = [] if first is None else [first]
    return list(islice(chain(start, cycle(tokens)), n_tokens))


class ContextTimer:
    """Runs tests on one context. The KV of a depth is kept between runs of the same depth. Each run generates other
    tokens than the last one, which a cache of experts would already hold.

    context: a llama_context. n_batch: tokens per call.
    """

    def __init__(self, context: Any, n_batch: int, tokens: list[int]) -> None:
        from llama_cpp import llama_cpp as api

        self._api = api
        self._context = context
        self._n_batch = n_batch
        self._tokens = tokens
        self._depth: int | None = None  # tokens in the KV cache that a test may start from
        self._n_generated = 0

    def sample(self, test: BenchTest) -> Sample:
        """One turn: as many runs as fill LEAST_S. Raises DeviceError, UsageError if llama.cpp cannot compute."""
        runs = [self.run(test)]
        left = LEAST_S - runs[0].seconds
        while left > 0 and len(runs) < MOST_RUNS:
            runs.append(self.run(test))
            left -= runs[-1].seconds
        return Sample(median(r.prompt_s for r in runs), median(r.gen_s for r in runs), len(runs))

    def run(self, test: BenchTest) -> Sample:
        self._go_to(test.n_depth)
        position = test.n_depth
        start = time.perf_counter()
        self._prefill(position, test.n_prompt)
        self._api.llama_synchronize(self._context)
        middle = time.perf_counter()
        position += test.n_prompt
        for _ in range(test.n_gen):
            token = self._tokens[(position + self._n_generated) % len(self._tokens)]
            self._decode([token])
            self._api.llama_synchronize(self._context)
            position += 1
        end = time.perf_counter()
        self._n_generated += test.n_gen
        return Sample(middle - start if test.n_prompt else 0.0, end - middle if test.n_gen else 0.0)

    def warm_up(self, test: BenchTest) -> None:
        """The whole prompt once and two tokens, not timed."""
        self.run(BenchTest(test.n_prompt, min(test.n_gen, 2), test.n_depth))

    def _go_to(self, depth: int) -> None:
        memory = self._api.llama_get_memory(self._context)
        if memory is None:
            raise DeviceError("this model keeps no context, so generation cannot be timed; choose a text model")
        if depth and depth == self._depth and self._api.llama_memory_seq_rm(memory, 0, depth, -1):
            return
        self._api.llama_memory_clear(memory, False)
        self._prefill(0, depth)
        self._api.llama_synchronize(self._context)
        self._depth = depth

    def _prefill(self, start: int, n_tokens: int) -> None:
        end = start + n_tokens
        for position in range(start, end, self._n_batch):
            self._decode(self._tokens[position : min(position + self._n_batch, end)])

    def _decode(self, tokens: list[int]) -> None:
        """Run the tokens that follow those in the KV cache, with the logits of the last. Raises UsageError if the cache
        is full, DeviceError if llama.cpp could not compute."""
        array = (self._api.llama_token * len(tokens))(*tokens)
        status = self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, len(tokens)))
        if status == 1:
            raise UsageError("the KV cache has no room for the next tokens; raise -c")
        if status == -2:
            raise DeviceError("no memory to compute the next tokens; use a smaller --vram, -c or -ub")
        if status != 0:
            raise DeviceError(f"llama.cpp could not compute the next tokens (llama_decode returned {status})")
