"""Options of llama-server behind `--`: what is passed on, and what is refused by name."""

import re
import subprocess

import pytest

from ggml_bridge.library import library_folder
from oallama.core.errors import UsageError
from oallama.run.server_options import FLAGS, VALUED, adapter_paths, checked_options


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ([], ()),
        (["--mirostat", "2", "--ignore-eos"], ("--mirostat", "2", "--ignore-eos")),
        (["--reasoning-budget=-1", "--cache-reuse", "256"], ("--reasoning-budget", "-1", "--cache-reuse", "256")),
    ],
)
def test_what_changes_no_placement_is_passed_on(asked, passed):
    assert checked_options(asked) == passed


def test_files_of_adapters():
    asked = ["--temp", "1", "--lora", "a.gguf,b.gguf", "--ignore-eos", "--lora-scaled", "C:c.gguf:0.5"]
    assert adapter_paths(checked_options(asked)) == ("a.gguf", "b.gguf", "C:c.gguf")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["-ngl", "99"], "-ngl is not passed on to llama-server: oallama places the weights"),
        (["--host", "0.0.0.0"], "--host is not passed on to llama-server: it is an option of oallama serve"),
        (["-md", "draft.gguf"], "-md is not passed on to llama-server: give it before --"),
        (["--spec-type", "ngram-mod"], "--spec-type is not passed on to llama-server: use --spec before --"),
        (["--spec-synth-rates", "0.8"], "--spec-synth-rates is not passed on"),
        (["--tools", "all"], "--tools is not passed on"), (["words"], "words is not passed on"),
        (["--ignore-eos=1"], "--ignore-eos is not passed on"), (["--mirostat"], "--mirostat needs a value"),
    ],
)  # fmt: skip
def test_what_would_change_more_is_refused_by_name(asked, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        checked_options(asked)


def test_llama_server_knows_all_of_them():
    told = subprocess.run(
        [library_folder() / "llama-server", "--help"], capture_output=True, text=True, check=True
    ).stdout
    names = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", told))
    assert names >= VALUED | FLAGS
    for name in FLAGS:
        assert re.search(rf"{name}(,|\s\s|\n)", told), f"{name} takes no value"
