"""The engine: a llama-server that computes a model as a plan places it, and its client.

Everything that computes is stock llama.cpp; the engine decides where weights lie, and ends the server with itself.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Literal, overload

from ggml_bridge.split import SplitMemory
from oallama.core.errors import DeviceError, ModelFileError, UsageError, spoken
from oallama.core.history import BlockRuns
from oallama.core.keywords import check_type, record_from
from oallama.core.routing import Traffic
from oallama.core.temporary import parent_for_server, temporary_folder
from oallama.core.types import ModelInfo, Operator
from oallama.core.units import MIB, format_bytes
from oallama.model.gguf_file import check_unchanged
from oallama.plan.export import stock_device
from oallama.plan.patterns import split_names
from oallama.plan.plan import Plan
from oallama.profile.acceptance import Acceptance, acceptance_in
from oallama.run.address import Address, free_address
from oallama.run.answer import Generation, Stream, checked_stops, generation_of
from oallama.run.client import Client, Gone, Refused
from oallama.run.held import EngineMemory, LoadNeeds, compare_memory, spill_warning
from oallama.run.keeper import Keeper
from oallama.run.plugin_report import PluginReport, ask_report, runs_of
from oallama.run.process import Launch, ServerProcess, wait_until
from oallama.run.sampling import Sampling
from oallama.run.split import SMALLER, SplitRun, corrected_plan

DEFAULT_TOKENS = 128  # of an answer whose end nobody asked for

CLOSED = "this engine is closed; make another one"
FOLDER = "oallama-engine-"
START_S = 1800.0  # for loading a model, from a slow disk
REPORT_S = 5.0  # for the plug-in's report
HEALTH_S = 2.0  # for one look at whether it answers
END_S = 0.3  # from SIGTERM to SIGKILL: it may be in the middle of a batch, and has nothing to save
TEMPLATE_S = 20.0  # for what a chat template computes, which a loop would exceed
TEMPLATE_BYTES = 1024 * MIB  # of memory beside that
UNREAD = "does not match the expected"
"""Said of an answer whose parts llama-server cannot tell apart; its text has come by then."""
NO_ROOM = "failed to allocate"
TOO_LARGE = "is too large to process"  # said of a text that is to be embedded
LOADED_LINE = b"initializing, n_slots"  # llama-server has loaded the model, and tries its chat template next

TEMPLATE_FAULT = b"common_chat_templates_init: error: |chat template parsing error: "


class Engine:
    """A model that is loaded as a plan says, which Placer.engine makes. Use it in a `with` statement. Threads may share
    it: what they ask for is computed in turns.

    plan: as it was loaded: where the device had less room than thought, more of the split operators is on the host,
    which warnings says. memory: bytes that it takes. device: its name. url, api_key: of llama-server's own HTTP
    interface, which OpenAI's clients use with /v1 behind the url. n_ctx: tokens that a conversation may have.
    """

    def __init__(
        self,
        model: ModelInfo,
        plan: Plan,
        operators: Sequence[Operator],
        launch: Callable[[Address, Path], Launch],
        needs: LoadNeeds,
        warnings: Sequence[str] = (),
        on_traffic: Callable[[Traffic], None] | None = None,
        chats: bool = True,
        keeper: Keeper | None = None,
    ) -> None:
        """Start llama-server and wait until the model is loaded. launch: how to start it, at an address and with a
        folder for its files. on_traffic: gets how often each expert was used, at the end. chats: whether the model has
        a chat template that may be used. keeper: what holds llama-server, and what is to be released behind it, as the
        worker that it computes on.

        Raises DeviceError where it does not start, or cannot compute what the plan says; ModelFileError.
        """
        self.model, self.plan, self.warnings = model, plan, tuple(warnings)
        self.device, self.attention = stock_device(plan), plan.attention
        self.split_stats: SplitRun | None = None
        """What the split backend did for the last answer; None without split operators."""
        self._operators, self._on_traffic, self.has_template = operators, on_traffic, chats
        self._keeper, self._is_closed = keeper or Keeper(), False
        try:
            self._folder = self._keeper.enter(lambda: temporary_folder(FOLDER, parent_for_server()))
            self._address = free_address("127.0.0.1", 0, secrets.token_urlsafe())
            self._client = Client(self._address)
            check_unchanged(model.files)
            self._child = _Child(self._keeper, launch(self._address, self._folder), model.path)
            self._child.wait(self._address)
            self._at_load = self._report()  # llama-server tries two tokens when it has loaded the model
            self.memory = self._adopt(needs, self._at_load)
            self.n_ctx = int(self._ask("/props")["default_generation_settings"]["n_ctx"])
        except BaseException:
            self._keeper.close()
            raise

    def _adopt(self, needs: LoadNeeds, report: PluginReport | None) -> EngineMemory:
        """Take over what the plug-in tells of the load; returns what it takes. Raises DeviceError where nothing can be
        computed so."""
        device_bytes, host_bytes = needs.device_bytes, needs.host_bytes
        if report is not None:
            if not report.usable:
                raise DeviceError(f"the model cannot be loaded as planned: {'; '.join(report.problems)}; {SMALLER}")
            names = split_names(self.plan, self._operators, self._on_traffic is not None)
            device_bytes += report.memory.device_weights + report.memory.device_compute
            host_bytes += report.memory.host_weights + report.memory.host_compute
            host_bytes -= sum(operator.bytes for operator in self._operators if operator.name in names)
            self.plan = corrected_plan(self.plan, self._operators, report.slices)
            self.warnings = (*self.warnings, *map(spoken, report.problems))
        memory = compare_memory(device_bytes, host_bytes, self.device, self.plan.memory)
        if (draft := self.plan.draft) is not None:
            device_bytes += draft.device_bytes
            memory = replace(
                memory,
                device_bytes=device_bytes,
                host_bytes=memory.host_bytes + draft.host_bytes,
                planned_device_bytes=memory.planned_device_bytes + draft.device_bytes,
            )
        spilled = spill_warning(device_bytes, self.device, needs.device_free)
        self.warnings = (*self.warnings, *filter(None, [memory.warning, spilled]))
        return memory

    def __repr__(self) -> str:
        held = self.memory
        places = f"{format_bytes(held.device_bytes)} there, {format_bytes(held.host_bytes)} on the host"
        closed = ", closed" if self._is_closed else ""
        return f"<Engine {Path(self.model.path).name} on {self.device}: {self.plan.policy}, {places}{closed}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End llama-server, and with it what it computes; may be called twice."""
        was_open, self._is_closed = not self._is_closed, True
        try:
            if was_open and self._on_traffic is not None and (report := self._done()) is not None:
                self._on_traffic(report.traffic(self._operators, self.model.n_expert))
        finally:
            self._keeper.close()

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def api_key(self) -> str:
        assert self._address.api_key is not None
        return self._address.api_key

    @property
    def pid(self) -> int:
        """Of llama-server."""
        return self._child.process.pid

    @property
    def n_vocab(self) -> int:
        return self.model.n_vocab

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Token numbers of a text; add_special: with BOS and EOS as the model wants them. `<|…|>` in it is a special
        token."""
        check_type("text", text, str)
        asked = {"content": text, "add_special": add_special, "parse_special": True}
        tokens: list[int] = self._ask("/tokenize", asked)["tokens"]
        return tokens

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """The embedding of each text, pooled as the GGUF says, else the mean over its tokens, of length 1. Raises
        UsageError for an empty text, and one that is longer than a micro-batch."""
        if not isinstance(texts, (str, Sequence)):
            raise UsageError(f"texts is of type {type(texts).__name__}; give a text, or a list of them")
        asked = [texts] if isinstance(texts, str) else list(texts)
        for text in asked:
            check_type("text", text, str)
            if not text:
                raise UsageError("there is no token to embed; give a text")
        found = self._ask("/v1/embeddings", {"input": asked})["data"]
        return [each["embedding"] for each in sorted(found, key=lambda each: int(each["index"]))]

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Number of tokens of messages in the model's chat template, the opening of the answer included. Raises as
        chat."""
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
        """Continue a prompt (text, or token numbers) until the model ends, max_tokens (-1: no limit), the end of the
        context, or one of the texts `stop`, which is not part of the answer.

        temperature 0 is greedy; else the draw follows from seed. sampling: the other fields of Sampling (top_k, top_p,
        min_p, repeat_penalty, grammar, json_schema).
        Raises UsageError for tokens outside the vocabulary, a prompt longer than the context, values that cannot be, or
        a closed engine; DeviceError.
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
        """Pieces of text as they come, whole characters each; its `generation` is the record at the end. Raises like
        generate, and where the engine is closed before the end.

        reuse: what the last answer left in the KV cache stays there as far as this prompt begins with it, and only the
        rest of the prompt is evaluated. Where the batches are cut then differs, so logits may differ in their last
        digits from those of the whole prompt at once. on_progress: gets tokens of the prompt that were read, and all.
        """
        body = self._request(max_tokens, temperature, seed, stop, reuse, sampling)
        return self._streamed("/completion", {**body, "prompt": self._prompt(prompt)}, on_progress=on_progress)

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
        """Answer messages of role and content, as OpenAI's API has them, in the model's own chat template. A model
        without one continues them as one text, as `oallama chat` does.

        stream: return a Stream of pieces. max_tokens None: until the model ends its answer or the context is full; 128
        where it has no template. What the last answer left in the KV cache is used as far as it is the same.
        on_progress: as in stream; on_reasoning: gets what the model thinks before its answer, as it comes. Raises
        UsageError for what are no such messages, ModelFileError for a template that cannot be used, and as generate.
        """
        from oallama.run.conversation import Conversation

        asked: dict[str, Any]
        if not self.has_template:
            n = DEFAULT_TOKENS if max_tokens is None else max_tokens
            told = Conversation.of(messages)
            if told.system:
                raise UsageError("this model has no chat template, so it cannot be given a system prompt")
            path, asked = "/completion", {"prompt": self._prompt(told.as_text())}
        else:
            n = -1 if max_tokens is None else max_tokens
            path, asked = "/v1/chat/completions", {"messages": checked_messages(messages), "verbose": True}
            self._templated("/apply-template", messages)
        body = self._request(n, temperature, seed, stop, True, sampling) | asked
        return self._streamed(path, body, on_progress, on_reasoning) if stream else self._whole(path, body)

    def runs(self) -> list[BlockRuns]:
        """Times of each split block since the model was loaded, by classes of batch sizes."""
        report = self._done()
        return [] if report is None else runs_of(report.blocks)

    def drafts(self) -> Acceptance | None:
        """Which drafts were accepted since the model was loaded; None where none were made."""
        metrics = self._address.metrics(self._child.process.pid, REPORT_S)
        return None if metrics is None else acceptance_in(metrics)

    @property
    def held_by_split(self) -> SplitMemory:
        """What the split back end holds now. Raises DeviceError where it does not answer."""
        if (report := self._report()) is None:
            raise DeviceError("llama-server's plug-in does not answer")
        return report.memory

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
            raise UsageError(f"{max_tokens} tokens cannot be generated; give 0 or more, or -1 for no limit")
        drawn = record_from(Sampling, {"temperature": temperature, "seed": seed, **sampling}, "way to sample")
        return {
            **drawn.request(),
            "n_predict": max_tokens,
            "stop": checked_stops(stop),
            "cache_prompt": reuse,
            "return_tokens": True,
        }

    def _prompt(self, prompt: str | Sequence[int]) -> str | list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise UsageError("there is no token to start from; give a prompt")
            return prompt
        tokens = numbers_of(prompt)
        check_tokens(tokens, self.n_vocab, self.n_ctx)
        return tokens

    def _templated(self, path: str, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Have messages put into the model's chat template. Raises UsageError, and ModelFileError where it cannot be
        used; one that takes too long ends llama-server, which cannot be told to stop it."""
        self._check_open()
        within = _TemplateLimits(self.model.path, self._child.process)
        try:
            return self._client.post(path, {"messages": checked_messages(messages)}, within.check)
        except ModelFileError:
            self.close()
            raise
        except Refused as error:
            if "template" not in str(error):  # it is of the messages
                raise self._refused(error) from None
            told = _reason(str(error))
            raise ModelFileError(f"the chat template of {self.model.path} fails: {told}; {TEMPLATE_REMEDY}") from None
        except Gone as error:
            raise self._gone(error) from None

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        self._check_open()
        try:
            return self._client.get(path) if body is None else self._client.post(path, body)
        except Refused as error:
            raise self._refused(error) from None
        except Gone as error:
            raise self._gone(error) from None

    def _whole(self, path: str, body: Mapping[str, Any]) -> Generation:
        before, start_s = self._split_report(), time.perf_counter()
        answer = self._ask(path, {**body, "stream": False})
        elapsed_s = time.perf_counter() - start_s
        reasoning = ""
        if "choices" in answer:
            message = answer["choices"][0]["message"]
            text, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
            answer = {**answer["__verbose"], "timings": answer["timings"]}
        else:
            text = answer["content"]
        self._count(before, answer)
        return _cut(generation_of(answer, text, answer["tokens"], elapsed_s, reasoning), body)

    def _streamed(
        self,
        path: str,
        body: Mapping[str, Any],
        on_progress: Callable[[int, int], None] | None = None,
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Stream:
        asked = {**body, "stream": True, "return_progress": True, "timings_per_token": True}
        return Stream(self._pieces(path, asked, on_progress, on_reasoning))

    def _pieces(
        self,
        path: str,
        body: Mapping[str, Any],
        on_progress: Callable[[int, int], None] | None,
        on_reasoning: Callable[[str], None] | None,
    ) -> Generator[str, None, Generation]:
        before, start_s = self._split_report(), time.perf_counter()
        text: list[str] = []
        thought: list[str] = []
        tokens: list[int] = []
        last: dict[str, Any] = {}
        try:
            for event in self._client.events(path, body):
                progress = event.get("prompt_progress")
                if progress is not None and on_progress is not None:
                    on_progress(int(progress["processed"]), int(progress["total"]))
                told = event.get("__verbose", event)
                if progress is None:
                    tokens += told.get("tokens", ())
                piece, thinking = _parts(event)
                if thinking and body["n_predict"]:
                    thought.append(thinking)
                    if on_reasoning is not None:
                        on_reasoning(thinking)
                if "timings" in event:
                    last = {**told, "timings": event["timings"]}
                if piece and body["n_predict"]:
                    text.append(piece)
                    yield piece
        except Refused as error:
            if UNREAD not in str(error) or "timings" not in last:
                raise self._refused(error) from None
            last["stop_type"] = "limit" if last["timings"]["predicted_n"] == body["n_predict"] else "none"
        except Gone as error:
            raise self._gone(error) from None
        elapsed_s = time.perf_counter() - start_s
        if "stop_type" not in last:
            raise self._gone(Gone("the answer has no end"))
        self._count(before, last)
        return _cut(generation_of(last, "".join(text), tokens, elapsed_s, "".join(thought)), body)

    def _refused(self, error: Refused) -> Exception:
        if error.kind == "exceed_context_size_error":
            n, n_ctx = error.details.get("n_prompt_tokens"), error.details.get("n_ctx")
            return UsageError(f"the prompt has {n} tokens but the context holds {n_ctx}; shorten it or raise -c")
        sentence = " ".join(str(error).split())
        if TOO_LARGE in sentence:
            return UsageError(f"the text is longer than a micro-batch ({sentence}); shorten it or raise -ub")
        if 400 <= error.status < 500:
            return UsageError(f"llama-server refuses the request: {sentence}")
        return DeviceError(f"llama-server could not compute: {sentence}")

    def _gone(self, error: Gone) -> Exception:
        if self._is_closed:
            return UsageError(CLOSED)
        if wait_until(lambda: self._child.process.has_ended, 1.0):
            return DeviceError(f"llama-server ended: {self._child.process.how_it_ended()}")
        return DeviceError(f"llama-server does not answer: {error}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(CLOSED)

    #
    # the plug-in
    #

    def _report(self) -> PluginReport | None:
        return ask_report(self._folder, self._child.process.pid, REPORT_S)

    def _done(self) -> PluginReport | None:
        """A report with the counts of answers alone."""
        report = self._report()
        return report if report is None or self._at_load is None else report.since(self._at_load)

    def _split_report(self) -> PluginReport | None:
        self._check_open()
        return self._report() if split_names(self.plan, self._operators) else None

    def _count(self, before: PluginReport | None, last: Mapping[str, Any]) -> None:
        after = None if before is None else self._report()
        if before is None or after is None:
            self.split_stats = None
            return
        done = after.since(before)
        n_decoded = max(0, int(last["timings"]["predicted_n"]) - 1)
        self.split_stats = SplitRun(done.stats - done.single, done.single, n_decoded)


TEMPLATE_REMEDY = "use --no-chat to continue the prompt as it is"


class _Child:
    """llama-server while it starts, and then its process. path: of the model."""

    def __init__(self, keeper: Keeper, launch: Launch, path: str) -> None:
        """Raises DeviceError where it cannot be started."""
        self._path = path
        self._is_loaded = False
        self._template_fault = ""
        try:
            self.process = keeper.enter(lambda: _kept_process(launch, self._log))
        except OSError as error:
            raise DeviceError(f"llama-server cannot be started: {error.strerror or error}") from None

    def wait(self, address: Address) -> None:
        """Wait until the model is loaded. Raises DeviceError where llama-server ends before, ModelFileError where the
        model's chat template cannot be used, or takes too long or too much."""
        process, template = self.process, _TemplateLimits(self._path, self.process)

        def is_over() -> bool:
            if self._is_loaded:  # it tries the chat template, a program from a stranger
                template.check()
            return process.has_ended or address.is_healthy(process.pid, HEALTH_S)

        in_time = wait_until(is_over, START_S)
        if process.has_ended:
            how = process.how_it_ended()  # the last line has been read
            if self._template_fault:
                raise ModelFileError(
                    f"the chat template of {self._path} fails: {self._template_fault}; {TEMPLATE_REMEDY}"
                )
            remedy = f"; {SMALLER}" if NO_ROOM in how else ""
            raise DeviceError(f"llama-server does not start: {how}{remedy}")
        if not in_time:
            raise DeviceError(f"llama-server does not answer after {START_S:.0f} s")

    def _log(self, line: bytes) -> None:
        self._is_loaded = self._is_loaded or LOADED_LINE in line
        if self._template_fault:
            is_told, fault = line.startswith(b"Error: "), line  # of what the first line begins to tell
        else:
            told = re.split(TEMPLATE_FAULT, line, maxsplit=1)
            is_told, fault = len(told) > 1, told[-1]
        if is_told:
            self._template_fault = _reason(fault.decode(errors="replace"))


class _TemplateLimits:
    """Time and memory that a chat template may take, from the first look on."""

    def __init__(self, path: str, process: ServerProcess) -> None:
        self._path, self._process = path, process
        self._first: tuple[float, int] | None = None  # when it was, and bytes that were used then

    def check(self) -> None:
        """Raises ModelFileError where it takes more."""
        now_s, n_bytes = time.monotonic(), self._process.rss_bytes
        self._first = self._first or (now_s, n_bytes)
        if now_s - self._first[0] > TEMPLATE_S or n_bytes - self._first[1] > TEMPLATE_BYTES:
            raise ModelFileError(
                f"the chat template of {self._path} takes more than {TEMPLATE_S:.0f} s, or "
                f"{format_bytes(TEMPLATE_BYTES)} of memory; {TEMPLATE_REMEDY}"
            )


def _reason(text: str) -> str:
    """What llama.cpp says of a template that fails, in one line: of an exception the last one."""
    lines = [line for line in text.splitlines() if line.startswith("Error: ")] or [text]
    return " ".join(lines[-1].removeprefix("Error: ").split())


@contextmanager
def _kept_process(launch: Launch, log: Callable[[bytes], None]) -> Iterator[ServerProcess]:
    """Raises OSError where it cannot be started."""
    process = ServerProcess(launch, log)
    try:
        yield process
    finally:
        process.end(END_S)


#
# checks of what is asked for
#


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


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them. Raises UsageError for what are none."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise UsageError('messages is no list; give one such as [{"role": "user", "content": "Hello!"}]')
    for number, each in enumerate(messages, 1):
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise UsageError(f"message {number} is no object with role and content")
    if not messages:
        raise UsageError('there is no message to answer; give one such as {"role": "user", "content": "Hello!"}')
    return [dict(each) for each in messages]


def _cut(generation: Generation, body: Mapping[str, Any]) -> Generation:
    """llama-server makes one token where none is asked for."""
    if body["n_predict"]:
        return generation
    return replace(generation, text="", tokens=(), n_gen=0, reasoning="", end="limit")


def _parts(event: Mapping[str, Any]) -> tuple[str, str]:
    """Text of an event: of the answer, and of what the model thinks before."""
    if "choices" not in event:
        return event.get("content") or "", ""
    delta = event["choices"][0]["delta"] if event["choices"] else {}
    return delta.get("content") or "", delta.get("reasoning_content") or ""
