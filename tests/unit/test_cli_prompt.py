"""Which word is the model and which the prompt, and where the prompt comes from."""

import io

import pytest

from oallama.cli.output import is_terminal
from oallama.cli.prompt import model_and_prompt, read_prompt
from oallama.core.errors import UsageError


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"GGUF")
    return str(path)


def test_a_file_or_a_gguf_name_is_the_model_and_anything_else_the_prompt(model, tmp_path):
    assert model_and_prompt([model], None, None) == (model, None)
    assert model_and_prompt(["missing.gguf"], None, None) == ("missing.gguf", None)
    assert model_and_prompt(["Once upon a time"], None, None) == (None, "Once upon a time")
    assert model_and_prompt([str(tmp_path)], None, None) == (None, str(tmp_path))  # a folder is no model
    assert model_and_prompt(["x" * 5000], None, None) == (None, "x" * 5000)
    assert model_and_prompt(["a\0b"], None, None) == (None, "a\0b")


def test_model_and_prompt_in_every_spelling(model):
    assert model_and_prompt([model, "hi"], None, None) == (model, "hi")
    assert model_and_prompt([model], None, "hi") == (model, "hi")
    assert model_and_prompt(["hi"], model, None) == (model, "hi")
    assert model_and_prompt([], model, "hi") == (model, "hi")
    assert model_and_prompt([], None, None) == (None, None)
    assert model_and_prompt([model], "other.gguf", None) == ("other.gguf", model)  # -m is the model


@pytest.mark.parametrize(
    ("words", "model", "prompt", "says"),
    [
        (["llama3", "hello"], None, None, "llama3 is no GGUF file"),
        (["why", "is", "it"], None, None, "quote a prompt of several words"),
        (["a.gguf", "hi"], "b.gguf", None, "quote a prompt of several words"),
        (["hi"], "b.gguf", "ho", "the prompt is given twice"),
        (["a.gguf", "hi"], None, "ho", "the prompt is given twice"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(words, model, prompt, says):
    with pytest.raises(UsageError, match=says):
        model_and_prompt(words, model, prompt)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_prompt_comes_from_a_pipe_when_it_is_not_given():
    assert read_prompt(None, io.StringIO("Once upon\na time\n")) == "Once upon\na time"
    assert read_prompt("-", io.StringIO("piped")) == "piped"
    assert read_prompt("given", io.StringIO("not read")) == "given"


@pytest.mark.parametrize(
    ("prompt", "stdin", "says"),
    [
        (None, Terminal("x"), "no prompt"),
        (None, io.StringIO(""), "the prompt is empty"),
        ("", io.StringIO("x"), "the prompt is empty"),
        (None, io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"), "not UTF-8"),
        (None, io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors="surrogateescape"), "not UTF-8"),
        ("a\udcff", io.StringIO(""), "not UTF-8"),
    ],
)
def test_no_prompt_is_said(prompt, stdin, says):
    with pytest.raises(UsageError, match=says):
        read_prompt(prompt, stdin)


def test_a_dumb_or_closed_stream_is_no_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(closed)
    assert not is_terminal(None)
