"""What decides the draw, from the options to llama.cpp's samplers: checked before a model is loaded."""

import pytest

from oallama.cli.main import exit_code
from oallama.core.errors import UsageError
from oallama.run.sampler import Sampling, grammar_of_schema


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"temperature": -1}, "--temp"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 1.1}, "--top-p"),
        ({"min_p": float("nan")}, "--min-p"),
        ({"repeat_penalty": 0}, "--repeat-penalty"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(value, says):
    with pytest.raises(UsageError, match=says):
        Sampling(**value)


@pytest.mark.parametrize("schema", ["{", "[1]", "1", '{"$ref": "https://example.com/x"}', '{"type": "nonsense"}'])
def test_what_is_no_schema_is_said(schema):
    with pytest.raises(UsageError, match="JSON schema") as said:
        grammar_of_schema(schema)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-f", "none.txt"], "cannot read the prompt none.txt"),
        (["-f", "text", "-p", "hi"], "the prompt is given twice, by -p and by -f"),
        (["-f", "bytes"], "the prompt in bytes is not UTF-8 text"),
        (["hi", "--grammar", "a", "--grammar-file", "b"], "a grammar is given twice"),
        (["hi", "--grammar-file", "none.gbnf"], "cannot read the grammar none.gbnf"),
        (["hi", "--json-schema", "{"], "the JSON schema is not JSON"),
        (["hi", "--top-p", "2"], "--top-p 2.0 is no probability"),
        (["hi", "--stop", ""], "--stop is empty"),
        (["hi", "-n", "-2"], "'-2' is not a whole number from -1 to"),
        (["hi", "-c", "-1"], "'-1' is not a whole number from 0 to"),
        (["hi", "--vram", "12"], "'12' is 12 bytes; write the unit, for example 12GiB"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said_before_anything_is_loaded(monkeypatch, capsys, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oallama.placer.Placer.of_file", lambda *_: pytest.fail("a model was read"))
    (tmp_path / "text").write_text("hi")
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert exit_code(["run", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert says in said.err
