"""The engine: a model loaded as a plan says, ready to generate.

Everything that computes is stock llama.cpp; the engine decides where weights lie. What llama.cpp reports as wrong is an
error here; where it aborts, as for a device that is lost, the process ends with one sentence (device/native_abort.py).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from oallama.core.errors import UsageError
from oallama.core.history import BlockRuns
from oallama.core.keywords import check_type, record_from
from oallama.core.options import Options
from oallama.core.types import ModelInfo, Operator
from oallama.core.units import format_bytes
from oallama.device.interrupt import held_interrupt
from oallama.plan.plan import Plan
from oallama.run.conversation import Conversation
from oallama.run.generate import (
    Generation,
    KvCache,
    Piece,
    Stops,
    check_tokens,
    generation_of,
    numbers_of,
    pieces,
    teacher_forced_logits,
    tokenize,
)
from oallama.run.load import load_placed
from oallama.run.routing import RoutingMeter
from oallama.run.sampler import Sampler, Sampling
from oallama.run.setup import (
    read_operators,
)
from oallama.run.split import SplitMeter, SplitRun
from oallama.run.stream import Stream, Turns
from oallama.run.template import Template, prompt_for, template_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from oallama.core.routing import Traffic
    from oallama.run.placed_llama import PlacedLlama


T = TypeVar("T")

DEFAULT_TOKENS = 128  # of an answer whose end nobody asked for


class Engine:
    """A loaded model, which Placer.engine makes. Use it in a `with` statement. Calls of several threads wait for each
    other.

    The attribute plan is the plan as it was loaded: where the device had less room than thought, more of the split
    operators is on the host, which the attribute warnings says. memory: bytes that it takes on the device and the host.
    """

    def __init__(
        self,
        model: ModelInfo,
        plan: Plan,
        options: Options | None = None,
        *,
        operators: Sequence[Operator] | None = None,
        tensor_names: Sequence[str] | None = None,
        probed: bool = False,
        progress: bool = True,
        on_traffic: Callable[[Traffic], None] | None = None,
    ) -> None:
        """Load a model as a plan says. options: device, threads, context, KV cache and attention; the plan's where they
        ask for nothing. operators, tensor_names: read from the file when not given. probed: whether probe_memory was
        asked of this load; else it is asked here, since native code must not see a file first in this process.
        progress: a bar on stderr where that is a terminal. on_traffic: gets how often each generate and stream used
        each expert, at its end; None: nothing is recorded, and computing is not held up for it.

        Raises PlanError (another model's plan, or one the split backend cannot do), ModelFileError, DoesNotFit (the
        host's memory), DeviceError, UsageError, BridgeError.
        """
        self._turns = Turns()
        self._streams: list[weakref.ref[Stream]] = []
        self._cache = KvCache()
        options = options or Options()
        if operators is None or tensor_names is None:
            operators, tensor_names = read_operators(model.path)
        self.model = model
        self.split_stats: SplitRun | None = None
        """What the split backend did for the last generate or stream; None without split operators."""
        self._on_traffic = on_traffic
        self._llama = load_placed(
            model, plan, options, operators=operators, tensor_names=tensor_names, probed=probed, progress=progress,
            records=on_traffic is not None,
        )  # fmt: skip
        self.plan, self.memory, self.warnings = self._llama.plan, self._llama.memory, self._llama.warnings
        self.device, self.attention, self.n_threads = self._llama.device, self._llama.attention, self._llama.n_threads
        self._split, self._recorder = self._llama.split, self._llama.recorder

    def __repr__(self) -> str:
        held = self.memory
        places = f"{format_bytes(held.device_bytes)} there, {format_bytes(held.host_bytes)} on the host"
        closed = ", closed" if self._turns.closed else ""
        return f"<Engine {Path(self.model.path).name} on {self.device}: {self.plan.policy}, {places}{closed}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the device, and end a stream whose reader is away; may be called twice. Raises UsageError
        while another thread's call is under way."""
        for known in self._streams:
            stream = known()
            if stream is not None:
                stream.end_unread()
        with held_interrupt():
            self._turns.close()
            self._llama.close()

    @property
    def llama(self) -> PlacedLlama:
        """A llama_cpp.Llama that behaves as usual, placed by the plan. It shares context and KV cache with generate,
        stream and logits, which leave nothing in the cache that it could use, and use nothing that it left there."""
        self._cache.forget()
        return self._open_llama

    @property
    def _open_llama(self) -> PlacedLlama:
        self._turns.check_open()
        return self._llama

    @property
    def n_ctx(self) -> int:
        return int(self._open_llama.n_ctx())

    @property
    def n_vocab(self) -> int:
        return int(self._open_llama.n_vocab())

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Token numbers of a text; add_special: with BOS and EOS as the model wants them."""
        check_type("text", text, str)
        return tokenize(self._vocab, text, add_special)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_TOKENS,
        temperature: float = 0.8,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Generation:
        """Continue a prompt (text, or token numbers) until the model ends, max_tokens, the end of the context, or one
        of the texts `stop`, which is not part of the answer.

        temperature 0 is greedy; else the draw follows from seed. sampling: the other fields of Sampling (top_k, top_p,
        min_p, repeat_penalty, grammar).
        Raises UsageError for tokens outside the vocabulary, a prompt longer than the context, values that cannot be, or
        a closed engine; DeviceError.
        """
        return self.stream(prompt, max_tokens, temperature, seed, stop, **sampling).rest()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_TOKENS,
        temperature: float = 0.8,
        seed: int = 0,
        stop: Sequence[str] = (),
        *,
        reuse: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Pieces of text as they come, whole characters each; its `generation` is the record at the end. Raises like
        generate, and where the engine is closed before the end.

        reuse: what the last generate or stream left in the KV cache stays there as far as this prompt begins with it,
        and only the rest of the prompt is evaluated. Where the batches are cut then differs, so logits may differ in
        their last digits from those of the whole prompt at once."""
        self._turns.check_open()
        check_type("max_tokens", max_tokens, int)
        drawn = record_from(Sampling, {"temperature": temperature, "seed": seed, **sampling}, "way to sample")
        stream = Stream(self._stream(prompt, max_tokens, drawn, stop, reuse))
        self._streams = [*(known for known in self._streams if known() is not None), weakref.ref(stream)]
        return stream

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], stream: Literal[False] = False, max_tokens: int | None = None,
        temperature: float = 0.8, seed: int = 0, stop: Sequence[str] = (), **sampling: Any,
    ) -> Generation: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], stream: Literal[True], max_tokens: int | None = None,
        temperature: float = 0.8, seed: int = 0, stop: Sequence[str] = (), **sampling: Any,
    ) -> Stream: ...  # fmt: skip

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        stream: bool = False,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Generation | Stream:
        """Answer messages of role and content, as OpenAI's API has them, in the model's own chat template. A model
        without one continues them as one text, as `oallama chat` does.

        stream: return a Stream of pieces. max_tokens None: until the model ends its answer or the context is full; 128
        where it has no template. What the last answer left in the KV cache is used as far as it is the same. Raises
        UsageError for what are no such messages, ModelFileError for a template that cannot be used, and as generate.
        """
        conversation = Conversation.of(messages)
        if not conversation.messages:
            raise UsageError('there is no message to answer; give one such as {"role": "user", "content": "Hello!"}')
        prompt = prompt_for(self._template, conversation)
        n = (self.n_ctx if prompt.ends else DEFAULT_TOKENS) if max_tokens is None else max_tokens
        answer = self.stream(prompt.tokens(self), n, temperature, seed, stop, reuse=True, **sampling)
        return answer if stream else answer.rest()

    @cached_property
    def _template(self) -> Template | None:
        return template_for(self.model.path, None)

    def _stream(
        self, prompt: str | Sequence[int], max_tokens: int, sampling: Sampling, stop: Sequence[str], reuse: bool
    ) -> Generator[str, None, Generation]:
        start_s = time.perf_counter()
        with self._turns.next(), self._turns.taken():
            tokens = self.tokenize(prompt) if isinstance(prompt, str) else numbers_of(prompt)
            check_tokens(tokens, self.n_vocab, self.n_ctx)
            if max_tokens < 0:
                raise UsageError(f"{max_tokens} tokens cannot be generated; give 0 or more")
            context, cache = self._context, self._cache
            if not reuse or self._llama.n_tokens:  # or somebody has kept the Llama and used it
                self._forget()
            with held_interrupt() as held:
                n_cached = cache.begin(context, tokens)
            stops, sampler = Stops(stop), Sampler(sampling, self._vocab)
            n_batches = -(-(len(tokens) - n_cached) // self._llama.context_params.n_ubatch)
            meter = SplitMeter(self._split.stats, n_batches) if self._split else None
            recorded = RoutingMeter(self._recorder, n_batches, self.model.n_expert) if self._recorder else None

            def decoded() -> None:
                held.hand_on()
                if meter is not None:
                    meter.beat()
                if recorded is not None:
                    recorded.beat()

            made: list[Piece] = []
            running = pieces(context, tokens, max_tokens, sampler, cache, stops, decoded)
            try:
                while True:
                    with held_interrupt() as held:
                        piece = next(running, None)
                    if piece is None:
                        break
                    made.append(piece)
                    if piece.text:
                        yield piece.text
            finally:
                running.close()
                self.split_stats = meter.run() if meter else None
                if recorded is not None and self._on_traffic is not None:
                    self._on_traffic(recorded.stop())
        return generation_of(made, len(tokens), start_s, n_cached)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Teacher-forced logits [n_tokens, n_vocab]: row i is what the model expects after tokens[: i + 1].

        Raises UsageError like generate, DeviceError.
        """
        checked = numbers_of(tokens)
        with self._turns.next(), self._turns.taken():
            check_tokens(checked, self.n_vocab, self.n_ctx)
            self._forget()
            with held_interrupt() as held:
                return teacher_forced_logits(self._context, checked, held.hand_on)

    def call(self, function: Callable[[], T]) -> T:
        """function(), which may use `llama`'s model and context through llama.cpp's own interface. Raises what it
        raises; a Ctrl-C at its end."""
        with self._turns.next(), self._turns.taken():
            self._forget()
            with held_interrupt():
                return function()

    def take_runs(self) -> list[BlockRuns]:
        """Times of each split block since the last call, by classes of batch sizes."""
        with self._turns.next(), self._turns.taken():
            return self._llama.take_runs()

    @property
    def _context(self) -> int:
        address: int = self._open_llama.ctx
        return address

    @property
    def _vocab(self) -> Any:
        return self._open_llama._model.vocab

    def _forget(self) -> None:
        """Use nothing of what the KV cache holds, neither here nor in the Llama's own book-keeping."""
        self._cache.forget()
        self._llama.n_tokens = 0
        self._llama._requires_eval = True
