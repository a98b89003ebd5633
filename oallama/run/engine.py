"""The engine: a model loaded as a plan says, ready to generate.

Everything that computes is stock llama.cpp; the engine decides where weights lie, and sees to it that what goes wrong
below becomes an error here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from oallama.core.errors import UsageError
from oallama.core.options import STOCK_ATTENTION, STOCK_BATCH, Options
from oallama.core.types import SPLIT_LAYOUT, ModelInfo, Operator
from oallama.device.cpu import default_threads
from oallama.device.guard import STALL_S
from oallama.device.load_params import LoadSettings, load_bridge
from oallama.device.opening import open_now
from oallama.model.memory import memory_of, probe_memory
from oallama.plan.patterns import host_patterns
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import split_text
from oallama.run.generate import (
    Generation,
    Piece,
    Sampler,
    check_tokens,
    generation_of,
    pieces,
    teacher_forced_logits,
    tokenize,
)
from oallama.run.load import EngineMemory, compare_memory, load_llama, usable_layouts
from oallama.run.setup import Held, check_device, check_layers, device_of, read_operators, release, runner_for
from oallama.run.split import SplitMeter, SplitRun, open_split

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from oallama.run.placed_llama import PlacedLlama

T = TypeVar("T")


class Engine:
    """A loaded model. Use it in a `with` statement; one call at a time.

    model, plan: what to load and where; the attribute `plan` is the plan as it was loaded: where the device had less
    room than thought, more of the split operators is on the host, which `warnings` say. options: device, threads,
    context, KV cache and attention; the plan's where they ask for nothing. operators, tensor_names: read from the file
    when not given. probed: whether probe_memory was asked of this load; else it is asked here, since native code must
    not see a file first in this process. progress: a bar on stderr where that is a
    terminal. stall_s: a remote device that makes no progress for so long is given up.

    Raises PlanError (another model's plan, or one the split backend cannot do), ModelFileError, DeviceError,
    UsageError, BridgeError.
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
        stall_s: float = STALL_S,
    ) -> None:
        options = options or Options()
        if operators is None or tensor_names is None:
            operators, tensor_names = read_operators(model.path)
        plan.check(model, operators)
        check_layers(plan, model.n_layer, operators)
        self.attention = options.attention(plan.record.attention or STOCK_ATTENTION)
        spec = device_of(plan, options.device)
        streams_tokens, streaming = bool(plan.record.token_assignment), plan.record.streaming
        kept_twice = streaming is not None and streaming.kept_twice
        placements, warnings = usable_layouts(operators, plan.operators, load_bridge(), streams_tokens, kept_twice)
        patterns: tuple[tuple[str, str | None], ...] = ()
        if not spec.is_none or any(placement.layout for placement in placements):
            patterns = host_patterns(operators, placements, tensor_names, streams_tokens)
        self.model, self.plan = model, plan
        self.n_threads = options.threads or default_threads()
        self._settings = LoadSettings(
            path=model.path,
            device=str(spec),
            n_ctx=options.n_ctx or plan.workload.n_ctx or model.n_ctx_train,
            n_batch=options.n_batch or STOCK_BATCH,
            n_ubatch=options.n_ubatch or plan.workload.n_ubatch,
            n_gpu_layers=plan.n_gpu_layers,
            host_patterns=patterns,
            split_text=split_text(operators, placements, plan.n_gpu_layers, streams_tokens),
            attention=self.attention,
            n_threads=self.n_threads,
        )
        if not probed:
            probe_memory(self._settings)
        self._running: Generator[Piece, None, None] | None = None
        self.split_stats: SplitRun | None = None
        """What the split backend did for the last generate or stream; None without split operators."""
        device_now = open_now(spec)
        self.device = device_now.label
        self._runner = runner_for(device_now, stall_s)
        loaded: list[Held] = []
        self._release = weakref.finalize(self, release, loaded, self._runner, device_now)
        try:
            check_device(plan, device_now)
            self._split = self._runner.call(lambda: open_split(plan, placements, operators, device_now))
            if self._split is not None:
                loaded.append(self._split)
            self._llama = load_llama(model, self._settings, device_now, self._runner, self._split, progress)
            loaded.append(self._llama)
            if self._split is not None:
                self.plan, shrunk = self._split.corrected(plan, operators)
                warnings = (*warnings, *shrunk)
            self.memory = self._measure_memory()
        except BaseException:
            self.close()
            raise
        self.warnings = (*warnings, *filter(None, [self.memory.warning]))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the device; may be called twice."""
        if self._running is not None:
            try:
                self._running.close()
            except ValueError:  # it is executing
                raise UsageError(
                    "another thread is still using this engine; close it when that call has ended"
                ) from None
        self._release()

    @property
    def llama(self) -> PlacedLlama:
        """A llama_cpp.Llama that behaves as usual, placed by the plan. It shares context and KV cache with generate,
        stream and logits, which start from an empty cache and leave none behind."""
        return self._llama

    @property
    def n_ctx(self) -> int:
        return int(self._llama.n_ctx())

    @property
    def n_vocab(self) -> int:
        return int(self._llama.n_vocab())

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Token numbers of a text; add_special: with BOS and EOS as the model wants them."""
        return tokenize(self._vocab, text, add_special)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        temperature: float = 0.8,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Continue a prompt (text, or token numbers) until the model ends, max_tokens, or the end of the context.

        temperature 0 is greedy; else the draw follows from seed. on_text gets every piece as it comes.
        Raises UsageError for tokens outside the vocabulary or a prompt longer than the context, DeviceError.
        """
        stream = self.stream(prompt, max_tokens, temperature, seed)
        while True:
            try:
                text = next(stream)
            except StopIteration as end:
                generation: Generation = end.value
                return generation
            if on_text is not None:
                on_text(text)

    def stream(
        self, prompt: str | Sequence[int], max_tokens: int = 128, temperature: float = 0.8, seed: int = 0
    ) -> Generator[str, None, Generation]:
        """Pieces of text as they come, whole characters each; returns the Generation. Raises like generate."""
        start_s = time.perf_counter()
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        check_tokens(tokens, self.n_vocab, self.n_ctx)
        if max_tokens < 0:
            raise UsageError(f"{max_tokens} tokens cannot be generated; give 0 or more")
        self._start()
        sampler = Sampler(temperature, seed)
        context, n_ubatch, beat = self._context, self._n_ubatch, self._runner.beat
        meter = SplitMeter(self._split.stats, -(-len(tokens) // n_ubatch), beat) if self._split else None
        running = self._runner.iterate(
            lambda: pieces(context, self._vocab, tokens, max_tokens, sampler, n_ubatch, meter.beat if meter else beat)
        )
        self._running = running
        made: list[Piece] = []
        try:
            for piece in running:
                made.append(piece)
                if piece.text:
                    yield piece.text
        finally:
            running.close()
            self.split_stats = meter.run() if meter else None
            self._finish()
        return generation_of(made, len(tokens), start_s)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Teacher-forced logits [n_tokens, n_vocab]: row i is what the model expects after tokens[: i + 1].

        Raises UsageError like generate, DeviceError.
        """
        checked = [int(token) for token in tokens]
        check_tokens(checked, self.n_vocab, self.n_ctx)
        self._start()
        context, n_vocab, n_ubatch, beat = self._context, self.n_vocab, self._n_ubatch, self._runner.beat
        try:
            return self._runner.call(lambda: teacher_forced_logits(context, checked, n_vocab, n_ubatch, beat))
        finally:
            self._finish()

    def call(self, function: Callable[[], T]) -> T:
        """function(), which may use `llama`'s model and context through llama.cpp's own interface, where this engine's
        calls run. Raises DeviceError when the device is lost meanwhile, and what function raises."""
        self._start()
        try:
            return self._runner.call(function)
        finally:
            self._finish()

    @property
    def _context(self) -> int:
        if not self._release.alive:
            raise UsageError("this engine is closed; make another one")
        address: int = self._llama.ctx
        return address

    @property
    def _vocab(self) -> Any:
        return self._llama._model.vocab

    @property
    def _n_ubatch(self) -> int:
        return int(self._llama.context_params.n_ubatch)

    def _start(self) -> None:
        if self._running is not None:
            raise UsageError("this engine is still generating; finish or close that stream first")

    def _finish(self) -> None:
        self._running = None
        self._llama.n_tokens = 0  # what its own book-keeping says of the KV cache
        self._llama._requires_eval = True

    def _measure_memory(self) -> EngineMemory:
        bridge = load_bridge()
        buffers = self._runner.call(lambda: memory_of(bridge, self._context))
        if self._split is not None:
            buffers = (*(b for b in buffers if b.buft != SPLIT_LAYOUT), *self._split.buffers())
        return compare_memory(buffers, self.device, self.plan.memory)
