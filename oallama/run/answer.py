"""Answers of an engine: the record of an answer, and its pieces as they come."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oallama.core.errors import UsageError

DEFAULT_TOKENS = 128
"""Default length of a continued text; also the length with which answers of unknown length are planned."""

WITHOUT_END = -1  # max_tokens: until the model ends or the context is full

End = Literal["", "model", "stop", "limit", "context"]
"""Why an answer ended: not yet ended; ended by the model or the grammar; by a stop sequence, max_tokens, or the end of
the context."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. Times in seconds: ttft_s from the call to the first token; tpot_s the mean per further token, 0 with
    fewer than two tokens."""

    text: str
    tokens: tuple[int, ...]  # without the end-of-generation token; of a stream those that end a whole character
    n_prompt: int
    n_gen: int
    ttft_s: float
    tpot_s: float
    end: End = ""
    n_cached: int = 0  # prompt tokens that were in the KV cache
    reasoning: str = ""  # reasoning before the answer, if the chat template marks it


class Stream(Iterator[str]):
    """Pieces of text, each of whole characters. generation: the record of the answer once the last piece was read, else
    None. Raises UsageError if the engine is closed before the end."""

    def __init__(self, pieces: Generator[str, None, Generation]) -> None:
        self._pieces = pieces
        self.generation: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.generation = self.generation or end.value
        raise StopIteration(self.generation)

    def rest(self) -> Generation:
        """Read to the end, and return the record."""
        for _ in self:
            pass
        if self.generation is None:
            raise UsageError("this stream was closed early, so its answer was not recorded")
        return self.generation

    def close(self) -> None:
        """Stop the answer."""
        self._pieces.close()


def checked_stops(stop: str | Sequence[str]) -> list[str]:
    """Return the stop sequences as a list. Raises UsageError for an empty string, and for other types."""
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError("--stop must be a string or a list of strings")
    if not all(texts):
        raise UsageError("--stop is empty; give a stop sequence")
    return list(texts)


def generation_of(
    last: Mapping[str, Any], text: str, tokens: Sequence[int], elapsed_s: float, reasoning: str = ""
) -> Generation:
    """The record of an answer. last: llama-server's last event or its whole answer, in its own format; elapsed_s: from
    the call to that."""
    timings = last["timings"]
    n_gen, gen_s = int(timings["predicted_n"]), 1e-3 * float(timings["predicted_ms"])
    ended = last.get("stop_type")
    if ended in ("eos", "none"):  # none: a grammar that allows nothing
        end: End = "model"
        n_gen, tokens = (n_gen - 1, tokens[: n_gen - 1]) if ended == "eos" else (n_gen, tokens)
    else:
        end = "stop" if ended == "word" else "context" if last.get("truncated") else "limit"
    n_steps = int(timings["predicted_n"]) - 1
    return Generation(
        text=text,
        tokens=tuple(tokens),
        n_prompt=int(timings["cache_n"]) + int(timings["prompt_n"]),
        n_gen=n_gen,
        ttft_s=max(0.0, elapsed_s - gen_s),
        tpot_s=gen_s / n_steps if n_steps > 0 and n_gen > 1 else 0.0,
        end=end,
        n_cached=int(timings["cache_n"]),
        reasoning=reasoning,
    )
