"""The engine computes what stock llama.cpp computes, wherever the weights are, and survives what happens below it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from e2e.forced import ENDLESS_CTX, N_CTX, attention, everything, forced
from e2e.logits import QUANTISED_NMSE, TOKENS, assert_stock, nmse, placed_logits, stock_logits
from e2e.script import started
from gguf_factory import write_gguf
from processes import ROOT, children_with, must_end, until
from rpc_server import RpcServer
from seeds import ALL, FRESH, crossed

import ggml_bridge
from oallama.core.errors import DeviceError, ModelFileError, PlanError, UsageError
from oallama.core.temporary import temporary_folder
from oallama.core.types import Operator
from oallama.device.load_params import load_bridge
from oallama.placer import Placer
from oallama.run import engine as engine_module
from oallama.run.engine import FOLDER, Engine
from oallama.run.vocabulary import count_tokens
from oallama.stores.default_model import FILE

Llama = ggml_bridge.load().libraries.llama_cpp.Llama

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

STORIES = ROOT / "models" / FILE  # whose text is whole characters, as a random model's is not
ENDLESS: dict[str, Any] = {"max_tokens": -1, "grammar": 'root ::= "a" root'}  # to the end of the context
LONG = [1 + i % 200 for i in range(6_000)]  # a prompt that takes long to read


@pytest.fixture(scope="module")
def cpu_engine(f16: Path) -> Iterator[Engine]:
    with forced(f16).engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def stories() -> Iterator[Engine]:
    with forced(STORIES, n_ctx=512).engine() as engine:
        yield engine


#
# the same numbers as stock
#


@pytest.mark.parametrize("weight_type", ["F16", "Q4_0", "Q8_0"])
def test_all_cpu_logits_are_bit_identical_to_stock(weight_type: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", weight_type=weight_type)
    with forced(path).llama() as llama:
        found = placed_logits(llama, TOKENS)
    assert found.dtype == np.float32 and found.shape == (len(TOKENS), 320)
    assert np.array_equal(found, stock_logits(path, TOKENS))
    assert not np.array_equal(found[:-1], found[1:]), "the rows differ, so the comparison says something"


def test_with_llama_cpp_pythons_own_defaults_too(f16: Path) -> None:
    """Its default is no flash attention and micro-batches of 512; one batch holds all tokens then."""
    placer = Placer.load(f16, device="none", threads=1, n_ctx=N_CTX, n_ubatch=512, flash_attn="off")
    with placer.llama(forced(f16).plan, logits_all=True) as llama:
        assert np.array_equal(placed_logits(llama, TOKENS), stock_logits(f16, TOKENS, flash_attn=False, n_ubatch=512))


def every_other(op: Operator) -> bool:
    return sum(op.name.encode()) % 2 == 0


@pytest.mark.parametrize(("weight_type", "where"), crossed(["F32", "F16", "Q4_0", "Q4_K"], [attention, every_other]))
def test_operators_on_the_worker_compute_the_same(weight_type: str, where: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", weight_type=weight_type)
    case = forced(path, "rpc-worker", whole=where)
    assert 0 < sum(p.gg for p in case.plan.operators) < len(case.plan.operators)
    with case.llama() as llama:
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)
        assert llama.warnings == () and llama.memory.host_bytes > 0
        assert llama.memory.device_bytes == llama.memory.planned_device_bytes > 0


def test_a_named_layout_computes_the_same(q4_0: Path) -> None:
    wanted = stock_logits(q4_0, TOKENS)
    for layout in load_bridge().cpu_layouts():
        with forced(q4_0, share=everything(0), layout=layout).llama() as llama:
            assert nmse(placed_logits(llama, TOKENS), wanted) <= QUANTISED_NMSE
            held = {buffer.buft for buffer in llama.buffers if buffer.model}
            assert any(layout in buft for buft in held), (layout, held)


#
# text
#


def test_greedy_text_is_what_stock_generates(f16: Path, cpu_engine: Engine) -> None:
    llama = Llama(str(f16), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    prompt = cpu_engine.tokenize("once upon")
    wanted = []
    for token in llama.generate(prompt, temp=0.0):
        wanted.append(token)
        if len(wanted) == 12:
            break
    llama.close()
    generation = cpu_engine.generate("once upon", max_tokens=12, temperature=0)
    assert list(generation.tokens) == wanted
    assert (generation.n_prompt, generation.n_gen) == (len(prompt), 12)
    assert generation.ttft_s > 0 and generation.tpot_s > 0


def test_the_seed_decides_the_draw(cpu_engine: Engine) -> None:
    first = cpu_engine.generate("once", max_tokens=24, temperature=1.5, seed=7)
    assert cpu_engine.generate("once", max_tokens=24, temperature=1.5, seed=7).tokens == first.tokens
    assert cpu_engine.generate("once", max_tokens=24, temperature=1.5, seed=8).tokens != first.tokens


def test_a_stop_text_ends_the_answer_and_is_left_out(stories: Engine) -> None:
    whole = stories.generate("Once upon a time", max_tokens=40, temperature=0).text
    stop = whole[30:33]
    cut = stories.generate("Once upon a time", max_tokens=40, temperature=0, stop=[stop])
    assert (cut.text, cut.end) == (whole[: whole.index(stop)], "stop")
    assert cut.n_gen < 40
    assert "".join(stories.stream("Once upon a time", max_tokens=40, temperature=0, stop=stop)) == cut.text


def test_a_grammar_allows_only_its_own(cpu_engine: Engine) -> None:
    for temperature in (0, 1.5):
        made = cpu_engine.generate("once", max_tokens=60, temperature=temperature, grammar='root ::= [ab]+ "!"')
        assert made.text and set(made.text) <= {"a", "b", "!"} and "!" not in made.text[:-1]
    yes = cpu_engine.generate("once", max_tokens=60, temperature=1.5, grammar='root ::= "yes"')
    assert (yes.text, yes.end) == ("yes", "model"), "it ends where the grammar does"
    chosen = cpu_engine.generate("once", max_tokens=60, temperature=1.5, json_schema='{"type": "boolean"}')
    assert chosen.text in ("true", "false")
    with pytest.raises(UsageError, match="failed to parse grammar"):
        cpu_engine.generate("once", grammar="root ::= [a")
    with pytest.raises(UsageError, match="failed to parse grammar"):
        cpu_engine.stream("once", grammar="root ::= [a").rest()
    with pytest.raises(UsageError, match="JSON schema"):
        cpu_engine.generate("once", json_schema='{"$ref": "http://127.0.0.1:1/x"}')
    assert cpu_engine.generate("once", max_tokens=3, temperature=0).n_gen == 3


def test_stream_gives_whole_characters_and_the_same_text(cpu_engine: Engine, stories: Engine) -> None:
    for engine in (cpu_engine, stories):
        whole = engine.generate("once", max_tokens=80, temperature=1.5, seed=3)
        stream = engine.stream("once", max_tokens=80, temperature=1.5, seed=3)
        assert "".join(stream) == whole.text
        assert stream.generation is not None and stream.generation.n_gen == whole.n_gen
    euros = list(cpu_engine.stream("once", max_tokens=9, temperature=1.5, grammar='root ::= "€€€"'))
    assert set("".join(euros)) == {"€"} and len(euros) > 1, "a token for each byte, and no half characters"


def test_progress_is_told_while_a_prompt_is_read(cpu_engine: Engine) -> None:
    told: list[tuple[int, int]] = []
    cpu_engine.stream(TOKENS, max_tokens=1, temperature=0, on_progress=lambda done, of: told.append((done, of))).rest()
    assert told == sorted(told) and len(told) > 1, "a prompt of several micro-batches"
    assert {of for _, of in told} == {len(TOKENS)} and told[-1][0] == len(TOKENS)

    def fails(done: int, of: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cpu_engine.stream("once", on_progress=fails).rest()


def test_what_is_in_the_kv_cache_is_used_again_where_that_is_asked(cpu_engine: Engine) -> None:
    fresh = cpu_engine.stream(TOKENS, max_tokens=4, temperature=0).rest()
    again = cpu_engine.stream(TOKENS, max_tokens=4, temperature=0, reuse=True).rest()
    assert (fresh.n_cached, fresh.n_prompt, again.n_prompt) == (0, len(TOKENS), len(TOKENS))
    assert again.n_cached >= len(TOKENS) - 1
    assert cpu_engine.generate(TOKENS, max_tokens=4, temperature=0).n_cached == 0


def test_generation_ends_where_the_model_ends(stories: Engine) -> None:
    llama = Llama(str(STORIES), vocab_only=True, verbose=False)
    end = llama.token_eos()
    llama.close()
    made = stories.chat([{"role": "user", "content": "What is 7 + 5?"}], temperature=0)
    assert (made.text.strip(), made.end) == ("7 + 5 = 12.", "model")
    assert end not in made.tokens and made.n_gen == len(made.tokens)


def test_generation_ends_with_the_context_and_the_limit(cpu_engine: Engine) -> None:
    n_ctx = cpu_engine.n_ctx
    prompt = [1 + i % 200 for i in range(n_ctx - 3)]
    found = cpu_engine.generate(prompt, max_tokens=50, temperature=1.0)
    assert found.n_gen <= 4 and found.end in ("context", "model")
    assert cpu_engine.generate([*prompt, 1, 2], max_tokens=50, temperature=1.0).n_gen <= 2
    none = cpu_engine.generate("once", max_tokens=0)
    assert (none.text, none.tokens, none.n_gen, none.end) == ("", (), 0, "limit")
    assert list(cpu_engine.stream("once", max_tokens=0)) == []


def test_a_closed_stream_leaves_the_engine_usable(cpu_engine: Engine) -> None:
    """Also one whose reader has gone without closing it: llama-server computes no more for either."""
    for _ in range(3):
        stream = cpu_engine.stream("once", **ENDLESS)
        next(stream)
        stream.close()
        with pytest.raises(UsageError, match="this stream was closed early"):
            stream.rest()
        next(cpu_engine.stream("once", **ENDLESS))
    assert cpu_engine.generate("once", max_tokens=3, temperature=0).n_gen == 3


def n_asked(engine: Engine) -> int:
    """Requests of this process that are under way."""
    connections, port = psutil.Process().net_connections("tcp"), int(engine.url.rpartition(":")[2])
    return sum(bool(each.raddr) and each.raddr.port == port for each in connections)


def test_threads_share_an_engine(worker_engine: tuple[Engine, int]) -> None:
    """Each gets what it would get alone; what is asked for meanwhile waits."""
    engine = worker_engine[0]
    prompts = [f"once {number}" for number in range(6)]
    wanted = [engine.generate(prompt, max_tokens=12, temperature=0).tokens for prompt in prompts]

    def ask(number: int) -> tuple[int, ...] | int:
        if number % 2:
            return engine.generate(prompts[number], max_tokens=12, temperature=0).tokens
        return engine.stream(prompts[number], max_tokens=12, temperature=0).rest().n_gen

    with ThreadPoolExecutor(len(prompts)) as pool, contextlib.closing(engine.stream("once", **ENDLESS)) as stream:
        next(stream)
        asked = [pool.submit(ask, number) for number in range(len(prompts))]
        until(lambda: n_asked(engine) == 1 + len(prompts))
        assert not any(each.done() for each in asked)
        stream.close()
        assert [each.result() for each in asked] == [
            tokens if number % 2 else len(tokens) for number, tokens in enumerate(wanted)
        ]


@pytest.mark.usefixtures("stub_server")
def test_a_closed_engine_is_an_error_whatever_is_asked_of_it(endless: Path) -> None:
    with forced(endless, "rpc-worker", whole=attention, n_ctx=ENDLESS_CTX).engine() as engine:
        pid = engine.pid
        abandoned = engine.stream("once", **ENDLESS)
        next(abandoned)
    assert not psutil.pid_exists(pid) and "closed" in repr(engine)
    question = [{"role": "user", "content": "once"}]
    asked: list[Callable[[], object]] = [
        lambda: engine.generate("once"), lambda: next(engine.stream("once")), lambda: engine.chat(question),
        lambda: engine.chat(question, stream=True).rest(), lambda: engine.tokenize("once"),
        lambda: engine.embed("once"), lambda: engine.prompt_tokens(question), abandoned.rest, abandoned.rest,
    ]  # fmt: skip
    for number, ask in enumerate(asked):
        with pytest.raises(UsageError, match=r"this (engine is closed|stream was closed early)"):
            ask()
            raise AssertionError(number)
    engine.close()


@pytest.mark.usefixtures("stub_server")
def test_a_call_of_another_thread_ends_where_the_engine_is_closed(endless: Path) -> None:
    engine, said = forced(endless, n_ctx=ENDLESS_CTX).engine(), list[str]()

    def ask() -> None:
        try:
            for _ in engine.stream("once", **ENDLESS):
                engine.generate("once", **ENDLESS)
        except UsageError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: n_asked(engine) == 2)
    engine.close()
    thread.join()
    assert said == ["this engine is closed; create a new one"]


def test_tokens_are_counted_as_the_engine_counts_them(f16: Path, cpu_engine: Engine) -> None:
    for text in ("once upon a time", "wörds and é ☃ bytes", ""):
        assert count_tokens(str(f16), text) == len(cpu_engine.tokenize(text))
    with pytest.raises(UsageError, match="not UTF-8"):  # JSON holds characters alone
        cpu_engine.tokenize("a byte: \udcff")


def test_a_model_without_a_template_continues(cpu_engine: Engine) -> None:
    said = cpu_engine.chat([{"role": "user", "content": "once"}], max_tokens=4, temperature=0)
    assert said.tokens == cpu_engine.generate("once", 4, temperature=0).tokens
    with pytest.raises(UsageError, match="message 1 has role 'wizard'"):
        cpu_engine.chat([{"role": "wizard", "content": "a"}])
    with pytest.raises(UsageError, match="this model has no chat template, so it cannot be given a system prompt"):
        cpu_engine.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "once"}])


def test_a_plan_that_splits_nothing_does_not_load_the_split_back_end(cpu_engine: Engine) -> None:
    assert cpu_engine.generate([5, 6, 7], max_tokens=2, temperature=0).n_gen == 2
    assert cpu_engine.split_report() is None and cpu_engine.runs() == []
    assert "ggml-oallama" not in Path(f"/proc/{cpu_engine.pid}/maps").read_text()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "no token"), ("", "no token"), ([0, 320], "invalid tokens"), ([-1], "vocabulary"),
        ([5 + (1 << 32)], "vocabulary"),
        ([1] * 300, "context holds"), ([1] * 256, "context holds"),
        ("once " * 300, "context holds 256; shorten it or raise -c"),
        ("a\udcff", "not UTF-8"),
    ],
)  # fmt: skip
def test_unusable_prompts_are_refused(cpu_engine: Engine, prompt: list[int] | str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        cpu_engine.generate(prompt)
    with pytest.raises(UsageError, match=reason):
        cpu_engine.stream(prompt).rest()


def test_embeddings_are_of_length_1(cpu_engine: Engine) -> None:
    first, second = cpu_engine.embed(["once upon a time", "there was"])
    assert np.linalg.norm(first) == pytest.approx(1, rel=1e-3) and len(first) == len(second)
    assert cpu_engine.embed("there was")[0] == pytest.approx(second, abs=1e-4)
    for wrong, said in (("", "no token"), ("a " * 200, "longer than a micro-batch"), (5, "texts must be a string")):
        with pytest.raises(UsageError, match=said):
            cpu_engine.embed(wrong)  # type: ignore[arg-type]


def test_chat_templates_answer_as_those_of_llama_do(stories: Engine) -> None:
    question: list[Any] = [{"role": "user", "content": "Who was Lily?"}]
    stock = Llama(str(STORIES), n_ctx=512, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    wanted = stock.create_chat_completion(question, max_tokens=8, temperature=0)
    stock.close()
    answer = stories.chat(question, max_tokens=8, temperature=0)
    assert stories.prompt_tokens(question) == answer.n_prompt == wanted["usage"]["prompt_tokens"]
    assert answer.text == wanted["choices"][0]["message"]["content"]
    assert "".join(stories.chat(question, stream=True, max_tokens=8, temperature=0)) == answer.text


#
# who may ask
#


def test_it_listens_on_this_machine_alone_and_answers_who_has_the_key(cpu_engine: Engine) -> None:
    listening = [c.laddr.ip for c in psutil.Process(cpu_engine.pid).net_connections("inet") if c.status == "LISTEN"]
    assert listening == ["127.0.0.1"]
    asked = {"prompt": "once", "n_predict": 1}
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {cpu_engine.api_key}x"}):
        assert httpx.post(f"{cpu_engine.url}/completion", json=asked, headers=headers).status_code == 401
    key = {"Authorization": f"Bearer {cpu_engine.api_key}"}
    assert httpx.post(f"{cpu_engine.url}/v1/completions", json=asked, headers=key).status_code == 200
    assert cpu_engine.api_key not in " ".join(psutil.Process(cpu_engine.pid).cmdline())


#
# chat templates, which are programs from strangers
#

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}"
EATS = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
HOSTILE = {
    "loops": (LOOPS, r"takes more than 1 s, or .* of memory; use --no-chat"),
    "eats memory": (EATS, r"takes more than .* s, or 1 GiB of memory; use --no-chat"),
    "fails": ("{{ raise_exception('so it is') }}", r"model.gguf fails: Jinja Exception: so it is; use --no-chat"),
    "is none": ("{% for %}", r"model.gguf fails: Unexpected token.*; use --no-chat"),
}


@pytest.mark.parametrize("kind", HOSTILE if ALL else ("loops", "fails"))
def test_a_template_that_cannot_be_used_ends_the_start_in_a_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, said = HOSTILE[kind]
    if kind == "loops":
        monkeypatch.setattr(engine_module, "TEMPLATE_S", 1.0)
    case = forced(write_gguf(tmp_path / "model.gguf", "llama", chat_template=template))
    with pytest.raises(ModelFileError, match=said) as caught:
        case.engine()
    assert "\n" not in str(caught.value)
    assert not children_with("llama-server"), "it has ended"
    if kind == "fails" and ALL:
        with case.engine(chats=False) as engine:
            assert engine.generate("once", max_tokens=2, temperature=0).n_gen == 2


@pytest.mark.parametrize("kind", [pytest.param("loops", marks=pytest.mark.thorough), "eats memory"])
def test_a_template_that_cannot_be_used_for_some_messages_ends_a_chat(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails can be asked again; one that takes too much ends with llama-server."""
    template = PLAIN
    for each in ("fails", kind):
        template = f"{{% if messages[-1].content == '{each}' %}}{HOSTILE[each][0]}{{% endif %}}{template}"
    with forced(write_gguf(tmp_path / "model.gguf", "llama", chat_template=template)).engine() as engine:
        for _ in range(2):
            assert engine.chat([{"role": "user", "content": "hi"}], max_tokens=2, temperature=0).n_gen == 2
            with pytest.raises(ModelFileError, match=HOSTILE["fails"][1]):
                engine.chat([{"role": "user", "content": "fails"}], max_tokens=2)
        if kind == "loops":
            monkeypatch.setattr(engine_module, "TEMPLATE_S", 1.0)
        with pytest.raises(ModelFileError, match=HOSTILE[kind][1]):
            engine.chat([{"role": "user", "content": kind}], max_tokens=2)
        must_end(engine.pid)  # it cannot be told to stop


#
# plans and memory
#


@pytest.mark.usefixtures("stub_server")
def test_memory_not_as_planned_is_said(f16: Path) -> None:
    """Of what a no_alloc load says that llama-server takes."""
    case = forced(f16, "rpc-worker", whole=attention)
    with case.with_breakdown(weights_gpu=case.plan.memory.weights_gpu + (8 << 20)).engine() as engine:
        assert len(engine.warnings) == 1 and "RPC" in engine.warnings[0] and "plan" in engine.warnings[0]


@pytest.mark.usefixtures("stub_server")
def test_a_file_that_changes_after_its_check_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama")
    case = forced(path)
    case.engine().close()
    os.utime(path)
    with pytest.raises(ModelFileError, match=r"model\.gguf: the file changed since it was checked; run again"):
        case.engine()
    path.unlink()
    with pytest.raises(ModelFileError, match=r"model\.gguf: No such file or directory since it was checked"):
        case.engine()


def test_a_device_plan_without_a_device_is_refused(f16: Path) -> None:
    with pytest.raises(PlanError, match="--device none is none"):
        forced(f16, "rpc-worker", whole=attention).engine(device="none")


#
# what happens below
#


@pytest.mark.usefixtures("stub_server")
@pytest.mark.parametrize("how", ["dropped", "with a stream in a cycle"])
def test_an_engine_that_is_dropped_ends_what_it_has_started(
    how: str, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    case = forced(endless, "rpc-worker", whole=attention, n_ctx=ENDLESS_CTX)
    engine = case.engine()
    pid = engine.pid
    if how != "dropped":
        stream = engine.stream("once", **ENDLESS)
        next(stream)
        engine.itself = engine, stream  # type: ignore[attr-defined]
        del stream
    assert len(list(tmp_path.glob(f"{FOLDER}*"))) == 1
    del engine
    gc.collect()
    must_end(pid)
    until(lambda: not list(tmp_path.glob(f"{FOLDER}*")))


@pytest.mark.usefixtures("stub_server")
def test_an_engine_outlives_the_thread_that_made_it(f16: Path) -> None:
    """Linux ends children with the thread that started them."""
    made: list[Engine] = []
    case = forced(f16, "rpc-worker", whole=attention)
    thread = threading.Thread(target=lambda: made.append(case.engine()))
    thread.start()
    thread.join()
    with made.pop() as engine:
        assert engine.generate("once", max_tokens=2, temperature=0).n_gen == 2


@contextlib.contextmanager
def beside_a_worker(endless: Path) -> Iterator[tuple[Engine, int]]:
    """An engine whose attention is on a worker, and the worker's process."""
    with RpcServer() as worker:
        case = forced(endless, f"rpc://{worker.endpoint}", whole=attention, n_ctx=ENDLESS_CTX)
        with case.engine() as engine:
            yield engine, worker.pid


@pytest.fixture(scope="module")
def worker_engine(endless: Path) -> Iterator[tuple[Engine, int]]:
    with beside_a_worker(endless) as engine:
        yield engine


def test_forty_ctrl_c_end_what_is_read_or_answered_within_a_second(worker_engine: tuple[Engine, int]) -> None:
    """Beside a device, half of them while a prompt is read. llama-server reads it no further: the next answer does not
    wait for it. Two of the forty may wait for a core here."""
    engine, moments, main = worker_engine[0], random.Random(FRESH), threading.main_thread().ident or 0
    began = time.monotonic()
    engine.generate(LONG, max_tokens=1)
    whole_s = time.monotonic() - began
    sent: list[float] = []
    ended_s, answered_s = [], []

    def interrupt() -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    for number in range(40):
        reads, begun = number % 2 == 0, threading.Event()
        least = moments.random() * (len(LONG) / 4 if reads else 20)  # tokens that are read, or pieces of the answer

        def progress(n: int, least: float = least, begun: threading.Event = begun) -> None:
            if n >= least and not begun.is_set():
                begun.set()
                threading.Timer(moments.random() * 0.01, interrupt).start()

        with pytest.raises(KeyboardInterrupt):
            if reads:
                engine.stream(LONG, max_tokens=1, on_progress=lambda n, _, told=progress: told(n)).rest()
            else:
                for n, _ in enumerate(engine.stream("once", **ENDLESS)):
                    progress(n)
        ended_s.append(time.monotonic() - sent[-1])
        if reads:
            assert engine.generate("once", max_tokens=2, temperature=0).n_gen == 2
            answered_s.append(time.monotonic() - sent[-1])
    assert sorted(ended_s)[-3] < 1
    assert sorted(answered_s)[len(answered_s) // 2] < whole_s / 3


@pytest.mark.parametrize("killed", ["llama-server", "worker"])
def test_what_is_killed_below_is_an_error_of_the_call(
    killed: str, endless: Path, request: pytest.FixtureRequest
) -> None:
    with contextlib.ExitStack() as stack:
        if killed == "worker":
            engine, worker = request.getfixturevalue("worker_engine")
        else:
            request.getfixturevalue("stub_server")
            engine, worker = stack.enter_context(beside_a_worker(endless))
        stream = engine.stream("once", **ENDLESS)
        next(stream)
        os.kill(engine.pid if killed == "llama-server" else worker, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"^llama-server ended: SIG") as caught:
            stream.rest()
        assert "\n" not in str(caught.value)
        for ask in (lambda: engine.generate("once"), lambda: engine.tokenize("once")):
            with pytest.raises(DeviceError, match=r"^llama-server ended: SIG"):
                ask()


OPEN = """
from rpc_server import RpcServer
server = RpcServer()
engine = forced(model, f"rpc://{server.endpoint}", whole=attention, n_ctx=32768).engine()
stream = engine.stream("once", -1, grammar='root ::= "a" root')
next(stream)
if words[0] == "lost":
    server.close()
print(*(child.pid for child in psutil.Process().children()), flush=True)
if words[0] == "killed":
    time.sleep(600)
"""


@pytest.mark.usefixtures("stub_server")
@pytest.mark.parametrize("how", ["open", "killed", "lost"])
def test_a_process_may_end_with_an_engine_open(
    endless: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it outlives the process; one that is killed leaves its folder to the next."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started(OPEN, endless, "", how) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == (1 if how == "lost" else 2)
        if how == "killed":
            process.kill()
        _, errors = process.communicate(timeout=60)
    must_end(*pids)
    assert (process.returncode, errors) == (-signal.SIGKILL if how == "killed" else 0, "")
    left = list(tmp_path.glob(f"{FOLDER}*"))
    assert len(left) == (how == "killed")
    if left:
        with temporary_folder(FOLDER, tmp_path) as folder:
            assert list(tmp_path.glob(f"{FOLDER}*")) == [folder]
