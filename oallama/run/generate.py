"""Text out of a loaded model, token by token: prompt in micro-batches, sampling in llama.cpp, whole characters out; and
the logits behind given tokens, for checks and comparisons."""

from __future__ import annotations

import codecs
import ctypes
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from oallama.core.errors import DeviceError, UsageError
from oallama.device.interrupt import held_interrupt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from oallama.run.sampler import Sampler


Wanted = Literal["none", "last", "all"]
End = Literal["", "model", "stop", "limit", "context"]
"""Why an answer ended: not yet; the model or the grammar ended it; a text to stop at, max_tokens, or the end of the
context was reached."""

_PIECE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. Times in seconds: ttft_s from the call to the first token; tpot_s the mean between tokens after it,
    0 with fewer than two tokens."""

    text: str
    tokens: tuple[int, ...]  # without the end-of-generation token
    n_prompt: int
    n_gen: int
    ttft_s: float
    tpot_s: float
    end: End = ""
    n_cached: int = 0  # tokens of the prompt that were in the KV cache already


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token: its number, the whole characters it completed, and when it was there (perf_counter)."""

    token: int | None  # None: the last piece, with what was left of an incomplete character
    text: str
    at_s: float
    end: End = ""  # of the last piece


def generation_of(made: Sequence[Piece], n_prompt: int, start_s: float, n_cached: int = 0) -> Generation:
    """The record of a finished stream that was asked for at start_s (perf_counter)."""
    tokens = tuple(piece.token for piece in made if piece.token is not None)
    times = [piece.at_s for piece in made if piece.token is not None]
    return Generation(
        text="".join(piece.text for piece in made),
        tokens=tokens,
        n_prompt=n_prompt,
        n_gen=len(tokens),
        ttft_s=(times[0] if times else made[-1].at_s) - start_s,
        tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0,
        end=made[-1].end,
        n_cached=n_cached,
    )


def tokenize(vocab: Any, text: str, add_special: bool = True) -> list[int]:
    """Token numbers of a text. add_special: with BOS and EOS as the model wants them. `<|…|>` in it is a
    special token.

    Raises UsageError for a text that is too long, and for a model without a vocabulary.
    """
    from llama_cpp import llama_cpp as api

    if not _has_vocabulary(vocab):
        raise UsageError("the model has no vocabulary, so no text can be given to it; use a file with one, or tokens")
    data = text.encode("utf-8", "surrogateescape")
    capacity = len(data) + 16
    while True:
        tokens = (api.llama_token * capacity)()
        with held_interrupt():  # a second BOS token is logged
            count = api.llama_tokenize(vocab, data, len(data), tokens, capacity, add_special, True)
        if count >= 0:
            return list(tokens[:count])
        if -count <= capacity:
            raise UsageError("the prompt cannot be tokenized; it is too long")
        capacity = -count


def _has_vocabulary(vocab: Any) -> bool:
    """llama.cpp aborts where text is made to tokens, or these to text, without one."""
    from llama_cpp import llama_cpp as api

    return bool(api.llama_vocab_type(vocab) != api.LLAMA_VOCAB_TYPE_NONE)


def numbers_of(tokens: Sequence[int]) -> list[int]:
    """Token numbers as a list. Raises UsageError for what are none."""
    try:
        return [index(token) for token in tokens]
    except TypeError:
        raise UsageError(
            f"a prompt is a text or a list of token numbers, not of type {type(tokens).__name__}"
        ) from None


def check_tokens(tokens: Sequence[int], n_vocab: int, n_ctx: int) -> None:
    """Raises UsageError unless there is at least one token, all are of this vocabulary, and they fit the context."""
    if not len(tokens):
        raise UsageError("there is no token to start from; give a prompt")
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise UsageError(f"token {token} is outside this model's vocabulary of {n_vocab}; tokenize with this model")
    if len(tokens) > n_ctx:
        raise UsageError(f"the prompt has {len(tokens)} tokens but the context holds {n_ctx}; shorten it or raise -c")


class Batch:
    """A llama_batch of sequence 0 that is filled anew for every decode. capacity: tokens, at most n_batch."""

    def __init__(self, capacity: int) -> None:
        import numpy as np
        from llama_cpp import llama_cpp as api

        self._api = api
        self._batch = api.llama_batch_init(capacity, 0, 1)
        view = np.ctypeslib.as_array
        self._token = view(self._batch.token, shape=(capacity,))
        self._position = view(self._batch.pos, shape=(capacity,))
        self._wanted = view(self._batch.logits, shape=(capacity,))
        view(self._batch.n_seq_id, shape=(capacity,))[:] = 1
        for i in range(capacity):
            self._batch.seq_id[i][0] = 0
        self._count = np.arange(capacity, dtype=np.int32)

    def decode(self, context: Any, tokens: Sequence[int], first_position: int, logits: Wanted) -> None:
        """Run tokens at positions from first_position on, and keep the logits of none, the last, or all of them.

        Raises UsageError where the KV cache is full, DeviceError where llama.cpp could not compute.
        """
        n_tokens = len(tokens)
        self._batch.n_tokens = n_tokens
        self._token[:n_tokens] = tokens
        self._position[:n_tokens] = self._count[:n_tokens] + first_position
        self._wanted[:n_tokens] = logits == "all"
        if logits == "last":
            self._wanted[n_tokens - 1] = True
        status = self._api.llama_decode(context, self._batch)
        if status == 1:
            raise UsageError("the KV cache has no room for the next tokens; raise -c")
        if status == -2:
            raise DeviceError("there is no room to compute the next tokens in; use a smaller --vram, -c or -ub")
        if status != 0:
            raise DeviceError(f"llama.cpp could not compute the next tokens (llama_decode returned {status})")

    def free(self) -> None:
        self._api.llama_batch_free(self._batch)


def token_bytes(vocab: Any, token: int) -> bytes:
    """The bytes a token stands for; b"" for a special token, and without a vocabulary."""
    from llama_cpp import llama_cpp as api

    if not _has_vocabulary(vocab):
        return b""
    buffer = (ctypes.c_char * _PIECE_BYTES)()
    length = api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False)
    if length < 0:
        buffer = (ctypes.c_char * -length)()
        length = api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False)
    return buffer.raw[: max(length, 0)]


def pieces(
    context: Any,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    cache: KvCache,
    stops: Stops,
    decoded: Callable[[], None] = lambda: None,
) -> Generator[Piece, None, None]:
    """Generate behind what `cache` holds, which the prompt begins with, until the model or grammar ends, max_tokens,
    the end of the context, or one of `stops`, which is left out.

    The rest of the prompt goes in by micro-batches, as llama.cpp would cut it anyway, so that an interrupt is seen
    between them; `decoded` is called after each, and after each token's decode. The sampler is freed at the end.
    """
    from llama_cpp import llama_cpp as api

    n_ubatch, vocab = api.llama_n_ubatch(context), vocab_of(context)
    batch = Batch(n_ubatch)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    end: End = "limit"

    def decode(tokens: Sequence[int], logits: Wanted) -> None:
        start = len(cache.tokens)
        try:
            batch.decode(context, tokens, start, logits)
        except BaseException:
            cache.forget()
            raise
        cache.tokens.extend(tokens)
        decoded()

    try:
        for start in range(len(cache.tokens), len(prompt), n_ubatch):
            chunk = prompt[start : start + n_ubatch]
            decode(chunk, "last" if start + len(chunk) == len(prompt) else "none")
        sampler.begin(prompt)
        n_ctx = api.llama_n_ctx(context)
        for index in range(max_tokens):
            token = sampler.sample(context)
            if token is None or api.llama_vocab_is_eog(vocab, token):
                end = "model"
                break
            yield Piece(token, stops.shown(characters.decode(token_bytes(vocab, token))), time.perf_counter())
            if stops.reached or index + 1 == max_tokens:
                end = "stop" if stops.reached else "limit"
                break
            if len(cache.tokens) == n_ctx:
                end = "context"
                break
            decode((token,), "last")
        api.llama_synchronize(context)  # nothing may be under way on a device when nobody watches it
        yield Piece(None, stops.shown(characters.decode(b"", final=True)) + stops.rest(), time.perf_counter(), end)
    finally:
        batch.free()
        sampler.free()


def vocab_of(context: Any) -> Any:
    """The llama_vocab of a context's model."""
    from llama_cpp import llama_cpp as api

    return api.llama_model_get_vocab(api.llama_get_model(context))


def teacher_forced_logits(
    context: Any, tokens: Sequence[int], decoded: Callable[[], None] = lambda: None
) -> npt.NDArray[np.float32]:
    """Logits [n_tokens, n_vocab] from an empty KV cache, in micro-batches as llama.cpp cuts any batch; `decoded` is
    called after each."""
    import numpy as np
    from llama_cpp import llama_cpp as api

    n_ubatch, n_vocab = api.llama_n_ubatch(context), api.llama_vocab_n_tokens(vocab_of(context))
    logits = np.empty((len(tokens), n_vocab), dtype=np.float32)
    batch = Batch(n_ubatch)
    try:
        KvCache().begin(context, tokens)
        for start in range(0, len(tokens), n_ubatch):
            chunk = tokens[start : start + n_ubatch]
            batch.decode(context, chunk, start, "all")
            rows = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(chunk) * n_vocab,))
            logits[start : start + len(chunk)] = rows.reshape(len(chunk), n_vocab)
            decoded()
    finally:
        batch.free()
    return logits


#
# prefix reuse
#


def common_length(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of `held` that a prompt begins with, but never the whole prompt: its last token makes the logits."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), max(most, 0))


class KvCache:
    """Sequence 0 of a context. tokens: what was decoded into it, in order; whoever decodes adds to them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def forget(self) -> None:
        """The cache may hold anything; nothing of it is used again."""
        self.tokens.clear()

    def begin(self, context: Any, prompt: Sequence[int]) -> int:
        """Keep the tokens that `prompt` begins with, drop the others; how many were kept.

        A sliding window or a recurrent state has lost what lay before the end of the sequence: where tokens would have
        to be dropped from it nothing is kept. Raises UsageError for a model that keeps no context.
        """
        from llama_cpp import llama_cpp as api

        memory = api.llama_get_memory(context)
        if memory is None:
            raise UsageError(
                "this model keeps no context, so it cannot generate; use it for embeddings through engine.llama"
            )
        n_held, n_kept = len(self.tokens), common_length(self.tokens, prompt)
        if n_kept and api.llama_memory_seq_pos_max(memory, 0) + 1 != n_held:  # somebody else decoded
            n_kept = 0
        if 0 < n_kept < n_held and api.llama_memory_seq_pos_min(memory, 0) > 0:
            n_kept = 0
        if 0 < n_kept < n_held and not api.llama_memory_seq_rm(memory, 0, n_kept, -1):
            n_kept = 0
        if n_kept == 0:
            api.llama_memory_clear(memory, True)
        del self.tokens[n_kept:]
        return n_kept


#
# texts that end a generation
#


class Stops:
    """Lets text through up to the first of the texts, and holds back what may be the beginning of one.

    Raises UsageError for an empty text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            texts = (texts,)
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise UsageError("--stop takes a text that ends the generation, or a list of them")
        if not all(texts):
            raise UsageError("--stop is empty; give a text that ends the generation")
        self._texts = tuple(texts)
        self._held = ""
        self.reached = False

    def shown(self, piece: str) -> str:
        """Add a piece, and return the text that may be shown now."""
        if self.reached:
            return ""
        text = self._held + piece
        found = [position for position in (text.find(stop) for stop in self._texts) if position >= 0]
        if found:
            self.reached, self._held = True, ""
            return text[: min(found)]
        n_held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def rest(self) -> str:
        """Return what was held back, at the end of the generation."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of text that begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
