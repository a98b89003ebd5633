"""A model used from Python: in one line, in a chat, as a stream; and the examples of README and docs/python.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT

from oallama.core.errors import UsageError
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.profile.store import FOLDER_VARIABLE
from oallama.run.engine import Engine
from oallama.stores.default_model import FILE

MODEL = ROOT / "models" / FILE
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was Lily?"}]

pytestmark = pytest.mark.usefixtures("kept_engines")

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def placer() -> Placer:
    return Placer.load(MODEL, device="none", threads=1)


@pytest.fixture(scope="module")
def plan(placer: Placer) -> Plan:
    return placer.plan("cpu", workload=placer.workload(64, 16), measure=False)


@pytest.fixture(scope="module")
def engine(placer: Placer, plan: Plan) -> Any:
    with placer.engine(plan, once=True) as engine:  # as Placer.run starts it, which may share it
        yield engine


@pytest.mark.thorough
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_run(
    page: str, tmp_path: Path, measured_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Page by page, as one program, where model.gguf is the default model."""
    (tmp_path / "model.gguf").symlink_to(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(measured_cache))
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert len(capsys.readouterr().out.split()) > 20


def test_one_line_and_a_chat_answer_in_the_models_template(placer: Placer, engine: Engine) -> None:
    answer = placer.run("Once upon a time", max_tokens=12, temperature=0)
    assert answer.text == engine.generate("Once upon a time", 12, temperature=0).text
    chat = engine.chat(QUESTION, max_tokens=12, temperature=0)
    assert placer.run("Who was Lily?", 12, system="Be brief.", temperature=0).text == chat.text
    assert chat.n_prompt == engine.prompt_tokens(QUESTION)
    assert "".join(engine.chat(QUESTION, stream=True, max_tokens=12, temperature=0)) == chat.text
    assert engine.chat(QUESTION, temperature=0).end == "model"


def test_a_chat_comes_in_pieces_and_one_that_was_closed_has_no_record(engine: Engine) -> None:
    whole = engine.chat(QUESTION, max_tokens=12, temperature=0)
    stream = engine.chat(QUESTION, stream=True, max_tokens=12, temperature=0)
    assert stream.generation is None and "".join(stream) == whole.text
    assert stream.generation is not None and stream.generation.n_cached > 0
    assert stream.generation == stream.rest() and stream.generation.n_gen == whole.n_gen
    closed = engine.stream("Once", temperature=0)
    next(closed)
    closed.close()
    assert list(closed) == []
    with pytest.raises(UsageError, match="this stream was closed early"):
        closed.rest()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: engine.generate(5), "a prompt must be a string or a list of token numbers, not int"),
        (lambda engine: engine.generate(["a"]), "a prompt must be a string or a list of token numbers, not list"),
        (
            lambda engine: engine.generate("a", max_token=5),
            "unknown sampling option 'max_token'; choose from temperature",
        ),
        (lambda engine: engine.generate("a", "5"), "max_tokens must be a whole number"),
        (lambda engine: engine.stream("a", temperature="hot"), "temperature must be a number"),
        (lambda engine: engine.generate("a", stop=5), "--stop must be a string or a list of strings"),
        (lambda engine: engine.generate("a", top_k=-1), "--top-k must be a number of tokens"),
        (lambda engine: engine.chat("Hello!"), "llama-server refuses the request: Expected 'messages' to be an array"),
        (lambda engine: engine.chat([]), "no message to answer"),
        (lambda engine: engine.prompt_tokens([]), "no message to answer"),
        (lambda engine: engine.tokenize(5), "text must be a string"),
        (
            lambda engine: engine.chat([{"content": "a"}]),
            "llama-server refuses the request: Failed to parse messages: Missing 'role'",
        ),
        (lambda engine: engine.chat([{"role": "user", "content": object()}]), "cannot send the request"),
        (lambda engine: engine.chat([{"role": "user"}]), "llama-server refuses the request: "),
    ],
)
def test_wrong_arguments_are_errors_of_ours(engine: Engine, call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
        call(engine)


def test_an_unknown_keyword_of_an_engine_is_refused(placer: Placer, plan: Plan) -> None:
    with pytest.raises(UsageError, match="unknown engine keyword 'n_contex'; choose from device, vram"):
        placer.engine(plan, n_contex=5)


def test_a_plan_is_shown_in_one_line_and_in_some(plan: Plan) -> None:
    assert re.fullmatch(
        rf"<Plan cpu for {FILE} on none: 0 B of weights on the device, [\d.]+ MiB on the host>", repr(plan)
    )
    name, load, _, operators, predicted = plan.summary().splitlines()[:5]
    assert name == f"{FILE} on none, policy cpu"
    assert load.startswith("for 64 prompt and 16 generated tokens in a context of ")
    assert operators == f"operators: 0 on the device, 0 split, {len(plan.operators)} on the CPU"
    assert predicted == "no prediction: planned without a profile"
