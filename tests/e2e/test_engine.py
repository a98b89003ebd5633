"""The engine computes what stock llama.cpp computes, wherever the weights are, and survives what happens below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from e2e.forced import N_CTX, attention, everything, forced
from e2e.logits import QUANTISED_NMSE, TOKENS, assert_stock, nmse, placed_logits, stock_logits
from e2e.script import started
from gguf_factory import write_gguf
from processes import must_end
from seeds import crossed

import ggml_bridge
from oallama.core.errors import ModelFileError, PlanError, UsageError
from oallama.core.types import Operator
from oallama.device.load_params import load_bridge
from oallama.device.native_abort import sentence_of
from oallama.placer import Placer
from oallama.run.engine import Engine

Llama = ggml_bridge.load().libraries.llama_cpp.Llama

pytestmark = pytest.mark.usefixtures("prober")


@pytest.fixture(scope="module")
def cpu_engine(f16: Path) -> Iterator[Engine]:
    with forced(f16).engine() as engine:
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
    with placer.llama(forced(f16).plan, progress=False, logits_all=True) as llama:
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
            held = {buffer.buft for buffer in llama.memory.buffers if buffer.model}
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


def test_a_stop_text_ends_the_answer_and_is_left_out(cpu_engine: Engine) -> None:
    whole = cpu_engine.generate("once", max_tokens=40, temperature=1.5, seed=3).text
    stop = whole[10:13]
    cut = cpu_engine.generate("once", max_tokens=40, temperature=1.5, seed=3, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.n_gen < 40
    assert "".join(cpu_engine.stream("once", max_tokens=40, temperature=1.5, seed=3, stop=(stop,))) == cut.text


def test_a_grammar_allows_only_its_own(cpu_engine: Engine) -> None:
    for temperature in (0, 1.5):
        made = cpu_engine.generate("once", max_tokens=60, temperature=temperature, grammar='root ::= [ab]+ "!"')
        assert set(made.text) <= {"a", "b", "!"} and "!" not in made.text[:-1]
    yes = cpu_engine.generate("once", max_tokens=60, temperature=1.5, grammar='root ::= "yes"')
    assert yes.text == "yes", "it ends where the grammar does"
    with pytest.raises(UsageError, match="cannot parse the grammar"):
        cpu_engine.generate("once", grammar="root ::= [a")
    assert cpu_engine.generate("once", max_tokens=3, temperature=0).n_gen == 3


def test_stream_gives_whole_characters_and_the_same_text(cpu_engine: Engine) -> None:
    whole = cpu_engine.generate("once", max_tokens=80, temperature=1.5, seed=3)
    streamed = list(cpu_engine.stream("once", max_tokens=80, temperature=1.5, seed=3))
    assert "".join(streamed) == whole.text
    raw = b"".join(cpu_engine.llama.detokenize([token]) for token in whole.tokens)
    assert whole.text == raw.decode("utf-8", "replace"), "bytes were not decoded token by token"


def test_characters_of_several_tokens_come_whole(cpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    euro = iter([b"\xe2", b"\x82", b"\xac!", b"\xe2"])
    monkeypatch.setattr("oallama.run.generate.token_bytes", lambda vocab, token: next(euro))
    assert list(cpu_engine.stream("once", max_tokens=4, temperature=1.5)) == ["€!", "\N{REPLACEMENT CHARACTER}"]


def test_generation_ends_where_the_model_ends(cpu_engine: Engine) -> None:
    end = cpu_engine.llama.token_eos()
    made = [cpu_engine.generate("once", max_tokens=200, temperature=1.0, seed=seed) for seed in range(12)]
    assert any(generation.n_gen < 200 for generation in made), "one token of 320 ends it, in 12 * 200 draws"
    assert all(end not in generation.tokens for generation in made)


def test_generation_ends_with_the_context(cpu_engine: Engine) -> None:
    n_ctx = cpu_engine.n_ctx
    prompt = [1 + i % 200 for i in range(n_ctx - 3)]
    assert cpu_engine.generate(prompt, max_tokens=50, temperature=1.0).n_gen <= 4
    assert cpu_engine.generate([*prompt, 1, 2, 3], max_tokens=50, temperature=1.0).n_gen <= 1


def test_a_closed_stream_leaves_the_engine_usable(cpu_engine: Engine) -> None:
    stream = cpu_engine.stream("once", max_tokens=50, temperature=0)
    next(stream)
    with pytest.raises(UsageError, match="still generating"):
        cpu_engine.generate("twice")
    stream.close()
    assert cpu_engine.generate("once", max_tokens=3, temperature=0).n_gen == 3


@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_closed_engine_is_an_error_whatever_is_asked_of_it(device: str, f16: Path) -> None:
    with forced(f16, device, whole=None if device == "none" else attention).engine() as engine:
        llama, abandoned = engine.llama, engine.stream("once", max_tokens=50, temperature=0)
        next(abandoned)
    asked: list[Callable[[], object]] = [
        lambda: engine.generate("once"), lambda: next(engine.stream("once")), lambda: engine.logits([1]),
        lambda: engine.tokenize("once"), lambda: engine.call(list), lambda: engine.n_ctx, lambda: engine.n_vocab,
        lambda: engine.llama, lambda: llama.n_ctx(), lambda: llama.tokenize(b"once"),
        lambda: llama("once", max_tokens=1), lambda: llama.eval([1]), lambda: llama.detokenize([1]),
        llama.token_eos, lambda: llama.ctx,
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(UsageError, match="this engine is closed"):
            ask()
    with pytest.raises(UsageError, match="this engine is closed"):
        next(abandoned)
    engine.close()
    llama.close()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "no token"), ([0, 320], "320"), ([-1], "vocabulary"), ([1] * 300, "context holds")],
)
def test_unusable_prompts_are_refused(cpu_engine: Engine, prompt: list[int], reason: str) -> None:
    for ask in (cpu_engine.generate, cpu_engine.logits):
        with pytest.raises(UsageError, match=reason):
            ask(prompt)  # type: ignore[operator]


def test_llama_is_a_usual_llama_and_shares_the_engine(f16: Path) -> None:
    stock = Llama(str(f16), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    wanted = stock("once upon", max_tokens=8, temperature=0)["choices"][0]["text"]
    stock.close()
    with forced(f16, "rpc-worker", whole=attention).engine() as engine:
        assert isinstance(engine.llama, Llama)
        logits = engine.logits(TOKENS)
        for _ in range(2):  # neither leaves anything in the shared KV cache that the other would take for its own
            assert engine.llama("once upon", max_tokens=8, temperature=0)["choices"][0]["text"] == wanted
            assert np.array_equal(engine.logits(TOKENS), logits)


def test_chat_templates_answer_as_those_of_llama_do(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}{{ tool_choice }}"
    path = write_gguf(tmp_path / "model.gguf", "llama", chat_template=template)
    question: list[Any] = [{"role": "user", "content": "once upon a time"}]
    stock = Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    wanted = stock.create_chat_completion(question, max_tokens=8, temperature=0)
    with forced(path).engine() as engine:
        assert engine.llama.chat_format == stock.chat_format == "chat_template.default"
        assert engine.llama.metadata == stock.metadata
        answer = engine.llama.create_chat_completion(question, max_tokens=8, temperature=0)
    stock.close()
    assert (answer["choices"], answer["usage"]) == (wanted["choices"], wanted["usage"])


#
# plans and memory
#


def test_memory_not_as_planned_is_said(f16: Path) -> None:
    case = forced(f16, "rpc-worker", whole=attention)
    with case.with_ledger(weights_gpu=case.plan.memory.weights_gpu + (8 << 20)).engine() as engine:
        assert len(engine.warnings) == 1 and "RPC" in engine.warnings[0] and "plan" in engine.warnings[0]


def test_a_file_that_changes_after_its_check_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama")
    case = forced(path)
    case.engine().close()
    os.utime(path)
    with pytest.raises(ModelFileError, match=r"model\.gguf: the file changed since it was checked; start again"):
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


@pytest.mark.parametrize("last", ["nothing", "generate", "logits"])
def test_an_engine_that_is_dropped_ends_its_worker(last: str, f16: Path) -> None:
    engine = forced(f16, "rpc-worker", whole=attention).engine()
    if last == "generate":
        engine.generate("once", max_tokens=2)
    elif last == "logits":
        engine.logits(TOKENS)
    (worker,) = (child for child in psutil.Process().children() if "ggml_bridge.rpc_server" in child.cmdline())
    del engine
    must_end(worker.pid)


OPEN = """
engine = forced(model, device, whole=attention if device != "none" else None).engine()
stream = engine.stream("once", max_tokens=10**6, temperature=1.5)
next(stream)
if words[0] == "lost":
    psutil.Process().children()[-1].kill()
    time.sleep(0.3)
"""


@pytest.mark.parametrize(("device", "how"), [("none", "open"), ("rpc-worker", "open"), ("rpc-worker", "lost")])
def test_a_process_may_end_with_an_engine_open(f16: Path, device: str, how: str) -> None:
    with started(OPEN, f16, device, how) as process:
        _, errors = process.communicate(timeout=60)
    expected = (1, f"oallama: {sentence_of('ggml-rpc.cpp')}\n") if how == "lost" else (0, "")
    assert (process.returncode, errors) == expected
