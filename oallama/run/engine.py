"""The engine: a model loaded as a plan says, ready to generate.

Everything that computes is stock llama.cpp; the engine decides where weights lie. What llama.cpp reports as wrong is an
error here; where it aborts, as for a device that is lost, the process ends with one sentence (device/native_abort.py).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from oallama.core.errors import UsageError, spoken
from oallama.core.history import BlockRuns
from oallama.core.keywords import check_type, record_from
from oallama.core.options import STOCK_ATTENTION, STOCK_BATCH, Options
from oallama.core.types import SPLIT_LAYOUT, ModelInfo, Operator
from oallama.core.units import format_bytes
from oallama.device.cpu import default_threads
from oallama.device.host_memory import host_memory_bytes
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import LoadSettings, load_bridge
from oallama.device.native_abort import exit_at_abort
from oallama.device.opening import open_now
from oallama.model.memory import memory_of, probe_memory
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
from oallama.run.load import EngineMemory, compare_memory, load_llama, spill_warning
from oallama.run.routing import RoutingMeter
from oallama.run.sampler import Sampler, Sampling
from oallama.run.setup import (
    check_device,
    check_host,
    check_layers,
    device_of,
    read_operators,
    release,
)
from oallama.run.split import SplitMeter, SplitRun, open_split
from oallama.run.stream import Stream, Turns
from oallama.run.template import Template, prompt_for, template_for
from oallama.run.weight_places import weight_places

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ggml_bridge.llama_context import RoutingRecorder
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
        plan.check(model, operators)
        check_layers(plan, model.n_layer, operators)
        self.attention = options.attention(plan.attention or STOCK_ATTENTION)
        spec = device_of(plan, options.device)
        first_layer = model.n_layer + 1 - plan.n_gpu_layers
        places = weight_places(
            operators, plan.operators, tensor_names, first_layer, bool(plan.token_assignment), plan.streaming,
            plan.residents,
        )  # fmt: skip
        placements, warnings = places.placements, places.warnings
        self.model, self.plan = model, plan
        self.n_threads = options.threads or default_threads()
        self._settings = LoadSettings(
            path=model.path,
            device=str(spec),
            n_ctx=options.n_ctx or plan.workload.n_ctx or model.n_ctx_train,
            n_batch=options.n_batch or STOCK_BATCH,
            n_ubatch=options.n_ubatch or plan.workload.n_ubatch,
            n_gpu_layers=plan.n_gpu_layers,
            host_patterns=places.named if spec.is_none else places.patterns,
            split_text=places.split_text,
            attention=self.attention,
            n_threads=self.n_threads,
        )
        if not probed:
            check_host(self._settings, probe_memory(self._settings), operators, host_memory_bytes())
        self.split_stats: SplitRun | None = None
        """What the split backend did for the last generate or stream; None without split operators."""
        self._on_traffic = on_traffic
        self._recorder: RoutingRecorder | None = None
        held = ExitStack()
        exit_at_abort()
        with held_interrupt():  # as long as nobody would close the device
            device_now = open_now(spec)
            self.device = device_now.label
            held.callback(device_now.close)
            self._release = weakref.finalize(self, release, held)
        try:
            check_device(plan, device_now)
            with held_interrupt():
                self._split = open_split(plan, placements, operators, model.n_layer, device_now)
                if self._split is not None:
                    held.callback(self._split.close)
            if on_traffic is not None:
                from ggml_bridge.llama_context import RoutingRecorder

                self._recorder = RoutingRecorder(load_bridge())
                held.callback(self._recorder.close)
            self._llama = load_llama(model, self._settings, device_now, self._split, progress, held, self._recorder)
            if self._split is not None:
                self.plan, shrunk = self._split.corrected(plan, operators)
                warnings = (*warnings, *shrunk)
            self.memory = self._measure_memory()
        except BaseException:
            self.close()
            raise
        spilled = spill_warning(self.memory.device_bytes, device_now)
        self.warnings = tuple(map(spoken, (*warnings, *filter(None, [self.memory.warning, spilled]))))

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
            self._release()

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
            return self._split.take_runs() if self._split is not None else []

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

    def _measure_memory(self) -> EngineMemory:
        bridge = load_bridge()
        with held_interrupt():
            buffers = memory_of(bridge, self._context)
        if self._split is not None:
            buffers = (*(b for b in buffers if b.buft != SPLIT_LAYOUT), *self._split.buffers())
        return compare_memory(buffers, self.device, self.plan.memory)
