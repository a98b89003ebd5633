"""Popular models by name: what a text means, and the file without weights that is written of each."""

import pytest

from oallama.cli.main import exit_code
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
from oallama.model.shape_file import write_empty
from oallama.model.shapes import POPULAR, popular

SOME = ("phi-4", "gpt-oss-20b")
VOCABULARY_BYTES = 64 << 20  # that a file without weights takes of the disk at most


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        *((name, name, "MXFP4" if name.startswith("gpt-oss") else "Q4_0") for name in POPULAR),
        ("gemma3:27b", "gemma-3-27b", "Q4_0"), ("google/gemma-3-27b-it", "gemma-3-27b", "Q4_0"),
        ("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", "qwen3-30b-a3b", "Q4_K"), ("llama3.2:1b", "llama-3.2-1b", "Q4_0"),
        ("Llama-3.1-8B-Instruct:q8_0", "llama-3.1-8b", "Q8_0"), ("qwen2.5-coder-32b", "qwen2.5-32b", "Q4_0"),
        ("gpt-oss:20b", "gpt-oss-20b", "MXFP4"), ("phi4", "phi-4", "Q4_0"), ("GLM 4.5 Air", "glm-4.5-air", "Q4_0"),
    ],
)  # fmt: skip
def test_a_popular_model_is_found_as_people_write_it(text, name, kind):
    assert popular(text) == (name, kind)


@pytest.mark.parametrize("text", ["", "hello", "llama3.2", "qwen3", "gemma-3-27b:Q9", ":", "Q4_0", "gemma-3"])
def test_what_names_none_or_several_is_none(text):
    assert popular(text) is None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.thorough) for name in POPULAR]
)
def test_the_file_of_a_popular_model_is_read_as_its_own_would_be(tmp_path, name):
    shape, kind = POPULAR[name], popular(name)[1]
    path = write_empty(tmp_path / "shape.gguf", shape, kind, name)
    info, found = model_info(read_gguf(path)), operators(read_gguf(path))
    assert (info.name, info.n_layer, info.n_embd, info.n_head) == (name, shape.n_layer, shape.n_embd, shape.n_head)
    assert {o.type for o in found} - {"F32"} == {kind} and len({o.layer for o in found}) == shape.n_layer + 1
    assert path.stat().st_size > info.n_layer << 20 and path.stat().st_blocks * 512 < VOCABULARY_BYTES


def test_a_card_is_asked_of_a_model_that_is_not_here(capsys):
    assert (
        exit_code(
            ["what-if", "llama3.2:1b", "--ram-speed", "60", "--gpu", "RTX 3060", "-p", "64", "-n", "16", "-c", "512"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("llama-3.2-1b, all Q4_0, 64 + 16 tokens") and "\nrtx3060-12  " in said
