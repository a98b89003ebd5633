"""How llama-server is found and started, and what it tells of its speed."""

from dataclasses import replace
from pathlib import Path

import placement_records as records
import pytest

from ggml_bridge.library import library_folder, soname
from oallama.core.errors import BridgeError, PlanError
from oallama.core.history import BlockRuns
from oallama.serve.address import Address
from oallama.serve.live import Live, Rate, block_runs, live_of
from oallama.serve.program import (
    ServerSettings,
    clean_environment,
    find_program,
    launch,
    prompt_cache_mib,
)

SETTINGS = ServerSettings(
    Address("127.0.0.1", 8080), n_parallel=4, threads=2, n_batch=None, name="m.gguf", pooling="mean"
)


def program(folder, with_ggml=True):
    folder.mkdir(parents=True)
    made = folder / "llama-server"
    made.write_text("#!/bin/sh\n", encoding="utf-8")
    made.chmod(0o755)
    if with_ggml:
        (folder / soname("ggml-base")).symlink_to(library_folder() / soname("ggml-base"))
    return made


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """The folder where set-up puts llama.cpp, without a program; nothing is on PATH."""
    monkeypatch.setattr("oallama.serve.program.library_folder", lambda: tmp_path / "lib")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return tmp_path / "lib"


def test_what_set_up_put_beside_the_libraries_is_used_before_that_of_path(libraries, tmp_path, monkeypatch):
    with pytest.raises(BridgeError, match=r"neither beside llama\.cpp's libraries nor on PATH; `oallama setup` builds"):
        find_program(None)
    on_path = program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_program(None) == on_path
    beside = program(libraries)
    assert find_program(None) == beside


def test_one_that_was_asked_for_is_used_or_refused(libraries, tmp_path):
    asked = program(tmp_path / "bin")
    assert find_program(str(asked)) == asked
    with pytest.raises(BridgeError, match="there is no program"):
        find_program(str(tmp_path / "nothing"))
    with pytest.raises(BridgeError, match="does not tell the version of its ggml"):
        find_program(str(program(tmp_path / "old", with_ggml=False)))


def arguments(served, tmp_path, settings=SETTINGS, uses_file=None, **environment):
    names = [operator.name for operator in served.operators]
    made = launch(
        Path("/opt/llama-server"), served.plan, served.operators, served.model.n_layer, names, settings,
        tmp_path, {"HOME": "/h", **environment}, uses_file,
    )  # fmt: skip
    return made, list(made.command)


def whole():
    """A plan that splits nothing."""
    served = records.served()
    placements = tuple(p if p.gg in (0, 1) else replace(p, gg=0.0, cg=0.0, cc=1.0) for p in served.plan.operators)
    return replace(served, plan=replace(served.plan, operators=placements))


def value(words, option):
    return words[words.index(option) + 1]


def test_it_is_started_with_the_plan_at_the_address(tmp_path):
    made, words = arguments(whole(), tmp_path)
    assert words[0] == "/opt/llama-server"
    assert value(words, "--host") == "127.0.0.1" and value(words, "--port") == "8080"
    assert value(words, "--cors-origins") == "localhost"
    assert value(words, "--rpc") == "127.0.0.1:9" and value(words, "--device") == "RPC0"
    assert value(words, "-c") == "512" and value(words, "--fit") == "off"
    assert value(words, "--parallel") == "4" and "--kv-unified" in words and "--metrics" in words
    assert made.uses_device and "GGML_BACKEND_PATH" not in made.environment
    assert "LLAMA_API_KEY" not in made.environment


def test_the_key_is_told_to_it_alone(tmp_path):
    keyed = replace(SETTINGS, address=Address("0.0.0.0", 1, "s3cret"))
    made, words = arguments(whole(), tmp_path, keyed, OALLAMA_API_KEY="other", LLAMA_API_KEY="other")
    assert made.environment["LLAMA_API_KEY"] == "s3cret" and "OALLAMA_API_KEY" not in made.environment
    assert not [word for word in words if "s3cret" in word or "key" in word]


def test_a_plan_that_splits_is_written_for_the_plug_in(tmp_path):
    made, _ = arguments(records.served(), tmp_path)
    assert made.environment["OALLAMA_PLAN"] == str(tmp_path / "plan.oallama")
    assert made.environment["OALLAMA_TIMES"] == str(tmp_path / "times")
    assert "libggml-oallama" in made.environment["GGML_BACKEND_PATH"]
    assert (tmp_path / "plan.oallama").read_text(encoding="utf-8").startswith("oallama-plan 1\n")


def test_a_back_end_of_the_users_is_loaded_unless_ours_is_needed(tmp_path):
    own = {"GGML_BACKEND_PATH": "/opt/libggml-mine.so"}
    assert arguments(whole(), tmp_path, **own)[0].environment["GGML_BACKEND_PATH"] == "/opt/libggml-mine.so"
    with pytest.raises(PlanError, match="leave --backend out"):
        arguments(records.served(), tmp_path, **own)
    ours = {"GGML_BACKEND_PATH": "/opt/libggml-oallama.so"}
    assert "GGML_BACKEND_PATH" not in arguments(whole(), tmp_path, **ours)[0].environment


def test_embeddings_are_asked_for_by_pooling(tmp_path):
    _, words = arguments(whole(), tmp_path)
    assert "--embeddings" in words and value(words, "--pooling") == "mean"
    assert value(words, "--batch-size") == str(whole().plan.workload.n_ubatch)  # llama-server would lower it anyway
    _, words = arguments(whole(), tmp_path, replace(SETTINGS, pooling="model"))
    assert "--embeddings" in words and "--pooling" not in words
    _, words = arguments(whole(), tmp_path, replace(SETTINGS, pooling=None, n_batch=1024))
    assert "--embeddings" not in words and value(words, "--batch-size") == "1024"


def test_a_vision_projector_lies_where_the_ledger_has_it(tmp_path):
    _, words = arguments(whole(), tmp_path, replace(SETTINGS, projector="/p.gguf", projector_on_device=True))
    assert value(words, "--mmproj") == "/p.gguf" and "--mmproj-offload" in words
    _, words = arguments(whole(), tmp_path, replace(SETTINGS, projector="/p.gguf"))
    assert value(words, "--mmproj") == "/p.gguf" and "--no-mmproj-offload" in words
    assert "--mmproj" not in arguments(whole(), tmp_path)[1]


@pytest.mark.parametrize(("left", "mib"), [(2**40, 8192), (8192 * 2**20 - 1, 8191), (5 * 2**20, 5), (0, 0)])
def test_the_prompt_cache_takes_no_more_than_is_left(left, mib):
    assert prompt_cache_mib(left) == mib


def test_variables_that_would_change_it_behind_our_back_are_kept_from_it():
    given = {
        "HOME": "/h",
        "LLAMA_ARG_PORT": "1",
        "LLAMA_API_KEY": "x",
        "OALLAMA_API_KEY": "x",
        "GGML_BACKEND_PATH": "/x",
        "OALLAMA_PLAN": "/x",
        "OALLAMA_TIMES": "/x",
        "AIP_MODE": "PREDICTION",
        "MTMD_BACKEND_DEVICE": "CUDA1",
        "LLAMA_CPP_LIB_PATH": "/kept",
    }
    assert clean_environment(given) == {"HOME": "/h", "LLAMA_CPP_LIB_PATH": "/kept", "GGML_NO_BACKTRACE": "1"}


def test_live_numbers_are_read_out_of_the_metrics():
    text = (
        "# HELP llamacpp:prompt_tokens_total x\n# TYPE llamacpp:prompt_tokens_total counter\n"
        "llamacpp:prompt_tokens_total 100\nllamacpp:prompt_seconds_total 0.5\nllamacpp:tokens_predicted_total 0\n"
        "llamacpp:tokens_predicted_seconds_total 0\nllamacpp:prompt_tokens_cached_total 7\n"
        "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    )
    assert live_of(text) == Live(Rate(100, 0.5, 200.0), Rate(0, 0.0, None), 7, 2, 1)


@pytest.mark.parametrize(
    "text", ["", "llamacpp:prompt_tokens_total nan\n", "llamacpp:requests_processing -inf\n", "\x00"]
)
def test_what_is_not_told_is_nothing(text):
    assert live_of(text) == Live(Rate(0, 0.0, None), Rate(0, 0.0, None), 0, 0, 0)


def test_runs_of_split_blocks_are_read_and_damaged_lines_are_not():
    text = "512 2 700 1000 2000 3000 4000 blk.0.ffn gate\n1 1 1 1 2 3 4 blk.0.ffn gate\n"
    damaged = "1 0 0 0 0 0 0 none\n1 2 3\n-1 1 1 1 1 1 1 x\n\n² 1 1 1 1 1 1 x\nx 1 1 1 1 1 1 x\n"
    near = pytest.approx
    assert block_runs(damaged + text) == [
        BlockRuns("blk.0.ffn gate", 512, 2, 700, near(2e-6), near(3e-6), near(5e-6)),
        BlockRuns("blk.0.ffn gate", 1, 1, 1, near(2e-9), near(3e-9), near(5e-9)),
    ]


def test_the_prompt_cache_is_limited_as_asked_for(tmp_path):
    _, words = arguments(whole(), tmp_path, replace(SETTINGS, cache_mib=100))
    assert value(words, "--cache-ram") == "100"
    _, words = arguments(whole(), tmp_path)
    assert "--cache-ram" not in words
