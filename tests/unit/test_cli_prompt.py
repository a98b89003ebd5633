"""Which word is the model and which the prompt, and where the prompt comes from."""

import io

import pytest

from oallama.cli.prompt import model_and_prompt, read_prompt
from oallama.cli.run import command, cut_text, most_tokens
from oallama.cli.sampling import DEFAULT_N_GEN, WITHOUT_END
from oallama.core.errors import UsageError
from oallama.run.generate import Generation
from oallama.run.template import Prompt
from oallama.stores.default_model import FILE


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a user who has some models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "models").mkdir()
    for name in ("some.Q4_K_M.gguf", "dir/inside.gguf", "models/llama-3.2-1b.gguf", "models/notes.txt"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("llama3", "models/llama-3.2-1b.gguf"), ("llama3:8b", "models/llama-3.2-1b.gguf"),
        ("./dir", "dir/inside.gguf"), ("dir", "dir/inside.gguf"), ("some.Q4_K_M", "some.Q4_K_M.gguf"),
        ("some", "some.Q4_K_M.gguf"), ("Qwen2-7B-Instruct", ""), ("models/nothing", "models/llama-3.2-1b.gguf"),
        ("mistral", ""),
    ],
)  # fmt: skip
def test_a_word_that_looks_like_a_model_is_no_prompt_and_models_near_by_are_named(folder, word, first):
    for words in ([word], [word, "hello"]):
        with pytest.raises(UsageError) as refused:
            model_and_prompt(words, None, None)
        said = str(refused.value)
        assert said.startswith(f"{word} ") and "no GGUF file" in said
        assert "GGUF files near by: " + first in said
        assert "notes.txt" not in said
    assert model_and_prompt([], None, word) == (None, word)  # by -p it is the prompt
    assert model_and_prompt([word], "my.gguf", None) == ("my.gguf", word)


@pytest.mark.parametrize(
    "word", ["Hello", "Hi!", "Why?", "2+2=", "don't", "Hello.", "llama3 is what?", "philosophy", "hi", "éé", "...", ""]
)
def test_a_word_that_is_none_is_the_prompt(folder, word):
    assert model_and_prompt([word], None, None) == (None, word)


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
    assert read_prompt("-", io.StringIO("not read"), of_file=True) == "-"


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


def test_the_built_in_model_is_named_when_it_is_used(capsys, monkeypatch):
    class Found(Exception):
        pass

    def of_file(path, *_):
        assert path.endswith(FILE)
        raise Found

    monkeypatch.setattr("oallama.cli.placement.default_model", lambda: f"/models/{FILE}")
    monkeypatch.setattr("oallama.placer.Placer.of_file", of_file)
    with pytest.raises(Found):
        command.main(["-p", "Once"], standalone_mode=False)
    assert FILE in capsys.readouterr().err


def test_an_answer_is_as_long_as_the_model_wants_unless_text_is_continued_or_a_length_is_asked_for():
    assert most_tokens(None, Prompt("hi", ends=True)) == WITHOUT_END
    assert most_tokens(None, Prompt("hi")) == DEFAULT_N_GEN
    assert most_tokens(5, Prompt("hi", ends=True)) == 5


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("limit", "cut after 7 tokens; -n -1"),
        ("context", "context of 256 tokens is full; -c 512"),
        ("model", ""),
        ("stop", ""),
    ],
)
def test_an_answer_that_was_cut_says_so_and_what_gives_more(end, says):
    said = cut_text(Generation("a", (1,) * 7, 3, 7, 0.1, 0.1, end), 256)
    assert says in said
    assert bool(said) == bool(says)
