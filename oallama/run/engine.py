"""The engine: a llama-server that runs a model under a plan, and its client.

Stock llama.cpp computes; the engine decides where weights lie, and ends the server.
"""

from __future__ import annotations

import re
import secrets
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Literal, overload

from oallama.core.errors import DeviceError, ModelFileError, UsageError
from oallama.core.history import BlockRuns
from oallama.core.keywords import check_type, record_from
from oallama.core.routing import ExpertCounts
from oallama.core.temporary import parent_for_server, temporary_folder
from oallama.core.types import ModelInfo, Operator
from oallama.core.units import MIB, format_bytes
from oallama.device.interrupt import held_interrupt
from oallama.model.gguf_file import check_unchanged
from oallama.plan.export import stock_device
from oallama.plan.patterns import split_names
from oallama.plan.plan import Plan
from oallama.profile.acceptance import Acceptance, acceptance_in
from oallama.run.address import Address, reserved_address
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END, Generation, Stream, checked_stops, generation_of
from oallama.run.client import Client, RequestRefused, ServerGone
from oallama.run.held import EngineMemory, LoadNeeds, compare_memory
from oallama.run.load_checks import release
from oallama.run.plugin_report import PluginReport, ask_report, runs_of
from oallama.run.process import Launch, ServerProcess, start_failure, wait_until
from oallama.run.prompt import REMEDY
from oallama.run.sampling import Sampling
from oallama.run.split import SMALLER, corrected_plan

CLOSED = "this engine is closed; create a new one"
FOLDER = "oallama-engine-"
START_S = 1800.0  # for loading a model, from a slow disk
REPORT_S = 5.0  # for the plugin's report
HEALTH_S = 2.0  # for one health check
END_S = 0.3  # from SIGTERM to SIGKILL: it may be in the middle of a batch, and has nothing to save
TEMPLATE_S = 20.0  # for what a chat template computes, which a loop would exceed
TEMPLATE_BYTES = 1024 * MIB  # of memory beside that
STREAMED = {"stream": True, "return_progress": True, "timings_per_token": True}
UNREAD = "does not match the expected"
"""llama-server's error for an answer that it cannot parse; its text was received before."""
UNPARSED = "Failed to parse messages"  # said of messages whose fields are wrong, with status 500
NO_ROOM = "failed to allocate"
TOO_LARGE = "is too large to process"  # said of a text that is to be embedded
LOADED_LINE = b"initializing, n_slots"  # llama-server has loaded the model, and tries its chat template next

TEMPLATE_FAULT = b"common_chat_templates_init: error: |chat template parsing error: "


class Engine:
    """A model loaded as planned, from Placer.engine. Use it in a `with` statement. Threads may share it: requests are
    computed in turns.

    plan: as loaded; if the device had less memory than planned, slices that did not fit are on the host, and warnings
    says so. memory: bytes taken. device: its name. url, api_key: of llama-server's HTTP interface; OpenAI's
    clients use url + /v1. n_ctx: largest number of tokens of a conversation.
    """

    def __init__(
        self,
        model: ModelInfo,
        plan: Plan,
        operators: Sequence[Operator],
        launch: Callable[[Address, Path], Launch],
        needs: LoadNeeds,
        warnings: Sequence[str] = (),
        on_expert_counts: Callable[[ExpertCounts], None] | None = None,
        chats: bool = True,
    ) -> None:
        """Start llama-server and wait until the model is loaded. launch: how to start it, at an address and with a
        folder for its files. on_expert_counts: gets the use counts of each expert at the end. chats: whether to use the
        model's chat template.

        Raises DeviceError if it does not start, or cannot compute the plan; ModelFileError.
        """
        self.model, self.plan, self.warnings = model, plan, tuple(warnings)
        self.device, self.attention = stock_device(plan), plan.attention
        self._operators, self._on_expert_counts, self.has_template = operators, on_expert_counts, chats
        self._is_closed, held = False, ExitStack()
        self._release = weakref.finalize(self, release, held)
        self._release.atexit = False  # then Linux ends llama-server; a fork that ends must not
        try:
            with held_interrupt():
                self._folder = held.enter_context(temporary_folder(FOLDER, parent_for_server()))
                self._address = held.enter_context(reserved_address("127.0.0.1", 0, secrets.token_urlsafe()))
            self._client = Client(self._address)
            check_unchanged(model.files)
            start = _Start(launch(self._address, self._folder), model.path)
            with held_interrupt():
                self._process = start.begin()
                held.callback(self._process.end, END_S)
            start.wait(self._process, self._address)
            self._at_load = self._report()  # llama-server tries two tokens when it has loaded the model
            self.memory = self._adopt(needs, self._at_load)
            self.n_ctx = int(self._ask("/props")["default_generation_settings"]["n_ctx"])
        except BaseException:
            with held_interrupt():
                self._release()
            raise

    def _adopt(self, needs: LoadNeeds, report: PluginReport | None) -> EngineMemory:
        """Take over the plugin's report of the load; returns the memory taken. Raises DeviceError for an unusable
        plan."""
        device_bytes, host_bytes = needs.device_bytes, needs.host_bytes
        if report is not None:
            if not report.usable:
                raise DeviceError(f"the model cannot be loaded as planned: {'; '.join(report.problems)}; {SMALLER}")
            names = split_names(self.plan, self._operators, self._on_expert_counts is not None)
            device_bytes += report.memory.device_weights + report.memory.device_compute
            host_bytes += report.memory.host_weights + report.memory.host_compute
            host_bytes -= sum(operator.bytes for operator in self._operators if operator.name in names)
            self.plan = corrected_plan(self.plan, self._operators, report.slices)
            self.warnings = (*self.warnings, *report.problems)
        memory_breakdown, draft = self.plan.memory, self.plan.draft
        if draft is not None and draft.model_path:  # nothing reports its memory
            device_bytes, host_bytes = device_bytes + draft.device_bytes, host_bytes + draft.host_bytes
            memory_breakdown = replace(memory_breakdown, weights_gpu=memory_breakdown.weights_gpu + draft.device_bytes)
        memory = compare_memory(device_bytes, host_bytes, self.device, memory_breakdown, needs.device_free)
        self.warnings = (*self.warnings, *filter(None, (memory.warning, memory.spill)))
        return memory

    def __repr__(self) -> str:
        held = self.memory
        places = f"{format_bytes(held.device_bytes)} on the device, {format_bytes(held.host_bytes)} on the host"
        closed = ", closed" if self._is_closed else ""
        return f"<Engine {Path(self.model.path).name} on {self.device}: {self.plan.policy}, {places}{closed}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End llama-server and any running request; may be called twice."""
        was_open, self._is_closed = not self._is_closed, True
        try:
            if was_open and self._on_expert_counts is not None and (report := self.split_report()) is not None:
                self._on_expert_counts(report.expert_counts(self._operators, self.model.n_expert))
        finally:
            with held_interrupt():
                self._release()

    @property
    def url(self) -> str:
        """Base URL of llama-server's HTTP interface."""
        return self._address.url

    @property
    def api_key(self) -> str:
        """Key that requests to url must send."""
        assert self._address.api_key is not None
        return self._address.api_key

    @property
    def pid(self) -> int:
        """Process id of llama-server."""
        return self._process.pid

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Token numbers of a text; add_special: with BOS and EOS if the model uses them. `<|…|>` is a special token."""
        check_type("text", text, str)
        body = {"content": text, "add_special": add_special, "parse_special": True}
        tokens: list[int] = self._ask("/tokenize", body)["tokens"]
        return tokens

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """The embedding of each text, pooled as the GGUF says, else the mean over its tokens, normalised to length 1.
        Raises UsageError for an empty text, for a text longer than a micro-batch, and where the plan left the device no
        room for embeddings (Workload.n_outputs)."""
        if not isinstance(texts, (str, Sequence)):
            raise UsageError(f"texts must be a string or a list of strings, not {type(texts).__name__}")
        inputs = [texts] if isinstance(texts, str) else list(texts)
        for text in inputs:
            check_type("text", text, str)
            if not text:
                raise UsageError("no token to embed; give a text")
        if self.plan.workload.n_outputs:
            raise UsageError("this engine embeds nothing; make its plan for a workload with n_outputs=0")
        rows = self._ask("/v1/embeddings", {"input": inputs})["data"]
        return [row["embedding"] for row in sorted(rows, key=lambda row: int(row["index"]))]

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Number of tokens of messages in the model's chat template, including the start of the answer. Raises the same
        as chat."""
        counted = self._templated("/v1/chat/completions/input_tokens", messages)
        return int(counted["input_tokens"])

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_TOKENS,
        temperature: float = 0.8,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        **sampling: Any,
    ) -> Generation:
        """Continue a prompt (text, or token numbers) until the model stops, max_tokens (-1: no limit), the end of the
        context, or a stop sequence `stop`, which is not part of the answer.

        temperature 0 is greedy; else seed determines the sampling. sampling: the other fields of Sampling (top_k,
        top_p, min_p, repeat_penalty, grammar, json_schema).
        Raises UsageError for tokens outside the vocabulary, a prompt longer than the context, invalid values, or a
        closed engine; DeviceError.
        """
        body = self._request(max_tokens, temperature, seed, stop, False, sampling)
        return self._whole("/completion", {**body, "prompt": self._prompt(prompt)})

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = DEFAULT_TOKENS,
        temperature: float = 0.8,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        *,
        reuse: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Pieces of text as they come, each of whole characters; `generation` of the stream is the record at the end.
        Raises the same as generate, and UsageError if the engine is closed before the end.

        reuse: keep the part of the KV cache that this prompt shares with the last request, and evaluate only the rest
        of the prompt. The batches then differ, so logits may differ in their last digits. on_progress: called with the
        number of prompt tokens read, and of all prompt tokens.
        """
        body = self._request(max_tokens, temperature, seed, stop, reuse, sampling)
        return Stream(self._pieces("/completion", {**body, "prompt": self._prompt(prompt)}, on_progress))

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], stream: Literal[False] = False, max_tokens: int | None = None,
        temperature: float = 0.8, seed: int = 0, stop: str | Sequence[str] = (), **sampling: Any,
    ) -> Generation: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], stream: Literal[True], max_tokens: int | None = None,
        temperature: float = 0.8, seed: int = 0, stop: str | Sequence[str] = (), *,
        on_progress: Callable[[int, int], None] | None = None, on_reasoning: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> Stream: ...  # fmt: skip

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        stream: bool = False,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_reasoning: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> Generation | Stream:
        """Answer messages with role and content, as in OpenAI's API, in the model's chat template. A model without a
        template continues them as one text, as `oallama chat` does.

        stream: return a Stream of pieces. max_tokens None: until the model stops or the context is full; 128 without a
        template. The KV cache of the last request is reused as far as it matches. on_progress: as in stream;
        on_reasoning: called with pieces of the reasoning before the answer. Raises UsageError for invalid messages,
        ModelFileError for an unusable template, and the same as generate.
        """
        from oallama.run.conversation import Conversation

        fields: dict[str, Any]
        if not self.has_template:
            n = DEFAULT_TOKENS if max_tokens is None else max_tokens
            conversation = Conversation.of(messages)
            if conversation.system:
                raise UsageError("this model has no chat template, so it cannot be given a system prompt")
            path, fields = "/completion", {"prompt": self._prompt(conversation.as_text())}
        else:
            n = WITHOUT_END if max_tokens is None else max_tokens
            path, fields = "/v1/chat/completions", {"messages": messages, "verbose": True}
            self._templated("/apply-template", messages)
        body = self._request(n, temperature, seed, stop, True, sampling) | fields
        return Stream(self._pieces(path, body, on_progress, on_reasoning)) if stream else self._whole(path, body)

    def runs(self) -> list[BlockRuns]:
        """Times of each split block since the model was loaded, by classes of batch sizes."""
        report = self.split_report()
        return [] if report is None else runs_of(report.blocks)

    def drafts(self) -> Acceptance | None:
        """Which drafts were accepted since the model was loaded; None where none were made."""
        metrics = self._address.metrics(self.pid, REPORT_S)
        return None if metrics is None else acceptance_in(metrics)

    def split_report(self) -> PluginReport | None:
        """Counts of the split back end since the model was loaded, and the memory that it holds; None if it is not
        loaded or does not answer."""
        report = self._report()
        return report if report is None or self._at_load is None else report.since(self._at_load)

    #
    # requests
    #

    def _request(
        self, max_tokens: int, temperature: float, seed: int, stop: str | Sequence[str], reuse: bool,
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        self._check_open()
        check_type("max_tokens", max_tokens, int)
        if max_tokens < -1:
            raise UsageError(f"max_tokens is {max_tokens}; use 0 or more, or -1 for no limit")
        drawn = record_from(Sampling, {"temperature": temperature, "seed": seed, **sampling}, "sampling option")
        return {
            **drawn.request(),
            "n_predict": max_tokens,
            "stop": checked_stops(stop),
            "cache_prompt": reuse,
            "return_tokens": True,
        }

    def _prompt(self, prompt: str | Sequence[int]) -> str | list[int]:
        try:
            if not len(prompt):
                raise UsageError("the prompt has no tokens; give a prompt")
            if isinstance(prompt, str):
                return prompt
            tokens = [index(token) for token in prompt]
        except TypeError:
            kind = type(prompt).__name__
            raise UsageError(f"a prompt must be a string or a list of token numbers, not {kind}") from None
        for token in tokens:
            if not 0 <= token < 1 << 31:  # of larger numbers llama-server would take the lower 32 bits
                raise UsageError(f"token {token} is outside the vocabulary; tokenize with this model")
        return tokens

    def _templated(self, path: str, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Apply the model's chat template to messages. Raises UsageError, and ModelFileError for an unusable template;
        a template that takes too long ends llama-server, which cannot interrupt it."""
        if not messages:  # the template would begin an answer to nothing
            raise UsageError('no message to answer; give e.g. {"role": "user", "content": "Hello!"}')
        with self._asking():
            try:
                return self._client.ask(path, {"messages": messages}, _template_limits(self.model.path, self._process))
            except ModelFileError:
                self.close()
                raise
            except RequestRefused as error:
                if "template" not in str(error):  # it is of the messages
                    raise
                fault = _reason(str(error))
                raise ModelFileError(f"the chat template of {self.model.path} fails: {fault}; {REMEDY}") from None

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._asking():
            return self._client.ask(path, body)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Make exceptions of the client sentences about the engine."""
        self._check_open()
        try:
            yield
        except RequestRefused as error:
            raise self._refused(error) from None
        except ServerGone as error:
            raise self._gone(error) from None

    def _whole(self, path: str, body: Mapping[str, Any]) -> Generation:
        start_s = time.perf_counter()
        answer = self._ask(path, {**body, "stream": False})
        elapsed_s = time.perf_counter() - start_s
        reasoning = ""
        if "choices" in answer:
            message = answer["choices"][0]["message"]
            text, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
            answer = {**answer["__verbose"], "timings": answer["timings"]}
        else:
            text = answer["content"]
        return _cut(generation_of(answer, text, answer["tokens"], elapsed_s, reasoning), body)

    def _pieces(
        self,
        path: str,
        body: Mapping[str, Any],
        on_progress: Callable[[int, int], None] | None,
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Generator[str, None, Generation]:
        start_s = time.perf_counter()
        text: list[str] = []
        thought: list[str] = []
        tokens: list[int] = []
        last: dict[str, Any] = {}
        with self._asking():
            try:
                for event in self._client.events(path, {**body, **STREAMED}):
                    progress = event.get("prompt_progress")
                    if progress is not None and on_progress is not None:
                        on_progress(int(progress["processed"]), int(progress["total"]))
                    details = event.get("__verbose", event)
                    if progress is None:
                        tokens += details.get("tokens", ())
                    piece, thinking = _parts(event)
                    if thinking and body["n_predict"]:
                        thought.append(thinking)
                        if on_reasoning is not None:
                            on_reasoning(thinking)
                    if "timings" in event:
                        last = {**details, "timings": event["timings"]}
                    if piece and body["n_predict"]:
                        text.append(piece)
                        yield piece
            except RequestRefused as error:
                if UNREAD not in str(error) or "timings" not in last:
                    raise
                last["stop_type"] = "limit" if last["timings"]["predicted_n"] == body["n_predict"] else "none"
            elapsed_s = time.perf_counter() - start_s
            if "stop_type" not in last:
                raise ServerGone("the answer is incomplete")
        return _cut(generation_of(last, "".join(text), tokens, elapsed_s, "".join(thought)), body)

    def _refused(self, error: RequestRefused) -> Exception:
        if error.kind == "exceed_context_size_error":
            n, n_ctx = error.details.get("n_prompt_tokens"), error.details.get("n_ctx")
            return UsageError(f"the prompt has {n} tokens but the context holds {n_ctx}; shorten it or raise -c")
        sentence = " ".join(str(error).split())
        if TOO_LARGE in sentence:
            return UsageError(f"the text is longer than a micro-batch ({sentence}); shorten it or raise -ub")
        if 400 <= error.status < 500 or UNPARSED in sentence:
            return UsageError(f"llama-server refuses the request: {sentence}")
        return DeviceError(f"llama-server could not compute: {sentence}")

    def _gone(self, error: ServerGone) -> Exception:
        if self._is_closed:
            return UsageError(CLOSED)
        if wait_until(lambda: self._process.has_ended, 1.0):
            return DeviceError(f"llama-server ended: {self._process.how_it_ended()}")
        return DeviceError(f"llama-server does not answer: {error}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(CLOSED)

    def _report(self) -> PluginReport | None:
        return ask_report(self._folder, self.pid, REPORT_S)


class _Start:
    """The start of llama-server, with what its log says meanwhile. path: of the model."""

    def __init__(self, launch: Launch, path: str) -> None:
        self._launch, self._path = launch, path
        self._is_loaded = False
        self._template_fault = ""

    def begin(self) -> ServerProcess:
        """Raises DeviceError if it cannot be started."""
        try:
            return ServerProcess(self._launch, self._log)
        except OSError as error:
            raise DeviceError(f"cannot start llama-server: {error.strerror or error}") from None

    def wait(self, process: ServerProcess, address: Address) -> None:
        """Wait until the model is loaded. Raises DeviceError if llama-server ends before, ModelFileError if the
        model's chat template cannot be used, or takes too long or too much."""
        check_template: Callable[[], None] | None = None

        def is_healthy(pid: int) -> bool:
            nonlocal check_template
            if self._is_loaded:  # it tries the chat template, a program from a stranger
                check_template = check_template or _template_limits(self._path, process)
                check_template()
            return address.is_healthy(pid, HEALTH_S)

        why = start_failure(process, is_healthy, START_S)
        if why is None:
            return
        if self._template_fault:
            raise ModelFileError(f"the chat template of {self._path} fails: {self._template_fault}; {REMEDY}")
        remedy = f"; {SMALLER}" if NO_ROOM in why else ""
        raise DeviceError(f"llama-server does not start: {why}{remedy}")

    def _log(self, line: bytes) -> None:
        self._is_loaded = self._is_loaded or LOADED_LINE in line
        if self._template_fault:
            is_told, fault = line.startswith(b"Error: "), line  # of what the first line begins to tell
        else:
            told = re.split(TEMPLATE_FAULT, line, maxsplit=1)
            is_told, fault = len(told) > 1, told[-1]
        if is_told:
            self._template_fault = _reason(fault.decode(errors="replace"))


def _template_limits(path: str, process: ServerProcess) -> Callable[[], None]:
    """A check of the time and memory that a chat template takes from now on, which raises ModelFileError."""
    begun_s, bytes_before = time.monotonic(), process.rss_bytes

    def check() -> None:
        if time.monotonic() - begun_s > TEMPLATE_S or process.rss_bytes - bytes_before > TEMPLATE_BYTES:
            raise ModelFileError(
                f"the chat template of {path} takes more than {TEMPLATE_S:.0f} s, or "
                f"{format_bytes(TEMPLATE_BYTES)} of memory; {REMEDY}"
            )

    return check


def _reason(text: str) -> str:
    """llama.cpp's message about a failing template, in one line: for an exception its last line."""
    lines = [line for line in text.splitlines() if line.startswith("Error: ")] or [text]
    return " ".join(lines[-1].removeprefix("Error: ").split())


def _cut(generation: Generation, body: Mapping[str, Any]) -> Generation:
    """llama-server generates one token even if none is requested."""
    if body["n_predict"]:
        return generation
    return replace(generation, text="", tokens=(), n_gen=0, reasoning="", end="limit")


def _parts(event: Mapping[str, Any]) -> tuple[str, str]:
    """Text of an event: of the answer, and of the reasoning before it."""
    if "choices" not in event:
        return event.get("content") or "", ""
    delta = event["choices"][0]["delta"] if event["choices"] else {}
    return delta.get("content") or "", delta.get("reasoning_content") or ""
