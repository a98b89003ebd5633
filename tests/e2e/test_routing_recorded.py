"""Experts counted while a model runs, against what its mul-mats were given; and --count-experts."""

from __future__ import annotations

import ctypes
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from e2e.placed import placed
from e2e.split_cases import ffn, split_placements, written
from gguf_factory import write_gguf

from oallama.bench.readback import check_tensor_layout, tensor_at, weight_of
from oallama.cli.main import exit_code
from oallama.core.options import Options
from oallama.core.routing import Traffic
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.profile.routing import read_routing
from oallama.profile.store import FOLDER_VARIABLE
from oallama.run.engine import Engine

Ids = npt.NDArray[np.int32]

PROMPT = [int(token) for token in np.random.default_rng(11).integers(0, 300, 150)]
N_UBATCH, N_GEN = 64, 9  # of placed()


def given_ids(path: str, batches: Sequence[Sequence[int]]) -> dict[int, list[Ids]]:
    """By layer, the ids [n_tokens, n_used] that stock llama.cpp gives to the down mul-mat, batch after batch; the last
    token of the last prompt batch and every later one has its logits computed."""
    from llama_cpp import llama_cpp as api

    from ggml_bridge.library import library_folder, soname

    ggml = ctypes.CDLL(str(library_folder() / soname("ggml-base")))
    check_tensor_layout(ggml)
    seen: dict[int, list[Ids]] = {}

    def on_node(node: int, ask: bool, _user_data: int) -> bool:
        tensor = tensor_at(node)
        if ggml.ggml_op_name(tensor.op) != b"MUL_MAT_ID":
            return not ask
        name = weight_of(tensor).name.decode()
        if "ffn_down_exps" in name and not ask:
            ids = tensor.src[2].contents
            rows = [
                (ctypes.c_int32 * ids.ne[0]).from_address(ids.data + token * ids.nb[1]) for token in range(ids.ne[1])
            ]
            if rows:
                seen.setdefault(int(name.split(".")[1]), []).append(np.array(rows, dtype=np.int32))
        return not ask or "ffn_down_exps" in name

    no_devices = (ctypes.c_void_p * 1)(None)
    model_params = api.llama_model_default_params()
    model_params.devices, model_params.n_gpu_layers = ctypes.cast(no_devices, ctypes.c_void_p), 0
    model = api.llama_model_load_from_file(path.encode(), model_params)
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = 256
    params.n_ubatch, params.n_threads, params.n_threads_batch = N_UBATCH, 1, 1
    callback = api.ggml_backend_sched_eval_callback(on_node)
    params.cb_eval = callback
    context = api.llama_init_from_model(model, params)
    batch, position = api.llama_batch_init(N_UBATCH, 0, 1), 0
    first_with_logits = next(i for i, tokens in enumerate(batches) if len(tokens) == 1) - 1
    for index, tokens in enumerate(batches):
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, 0
            batch.logits[i] = i == len(tokens) - 1 and index >= first_with_logits
        assert api.llama_decode(context, batch) == 0
        position += len(tokens)
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return seen


def batches_of(tokens: Sequence[int]) -> list[Sequence[int]]:
    """The prompt's micro-batches, and the tokens that are decoded behind it: all but the last one."""
    prompt = [PROMPT[start : start + N_UBATCH] for start in range(0, len(PROMPT), N_UBATCH)]
    return [*prompt, *([token] for token in tokens[:-1])]


def engine_of(path: Path, take: Callable[[Traffic], None] | None, device: str = "none", split: bool = False) -> Engine:
    case = placed(path) if split else placed(path, device)
    plan = case.plan
    if split:
        operators = split_placements(case.operators, ffn(0.5))
        memory = replace(plan.memory, limit=1 << 40, capacity=1 << 40)
        plan = replace(plan, device=device, operators=operators, memory=memory)
    return Engine(
        case.model,
        plan,
        Options(threads=1),
        operators=case.operators,
        tensor_names=case.tensor_names,
        probed=True,
        progress=False,
        on_traffic=take,
    )


@pytest.mark.parametrize(
    ("arch", "n_used", "device", "split"),
    [
        ("llama-moe", 2, "none", False),
        ("llama-moe", 1, "none", False),
        ("llama-moe", 8, "none", False),
        ("qwen2moe", 2, "none", False),
        ("deepseek2", 2, "none", False),
        ("gpt-oss", 2, "none", False),
        ("llama-moe", 2, "rpc-worker:1", False),
        ("llama-moe", 2, "cpu-pair", True),
    ],
)
def test_what_is_recorded_is_what_the_experts_were_given(
    arch: str, n_used: int, device: str, split: bool, models: Path
) -> None:
    path = written(models, arch, n_expert_used=n_used)
    taken: list[Traffic] = []
    with engine_of(path, taken.append, device, split=split) as engine:
        answer = engine.generate(PROMPT, N_GEN, temperature=0)
    (traffic,) = taken
    seen = given_ids(str(path), batches_of(answer.tokens))
    n_decoded = len(answer.tokens) - 1
    assert traffic.decode.keys() == traffic.prompt.keys() == seen.keys()
    for layer, parts in seen.items():
        together = np.concatenate(parts)
        halves = together[: len(together) - n_decoded], together[len(together) - n_decoded :]
        for tally, ids in zip((traffic.prompt[layer], traffic.decode[layer]), halves, strict=True):
            assert tally.n_tokens == len(ids)
            assert tally.uses == tuple(np.bincount(ids.ravel(), minlength=8))


def test_a_broken_off_answer_is_recorded_as_far_as_it_went(models: Path) -> None:
    taken: list[Traffic] = []
    with engine_of(written(models, "llama-moe", n_expert_used=2), taken.append) as engine:
        stream = engine.stream(PROMPT[:20], 50, temperature=0)
        next(stream)
        stream.close()
        engine.generate(PROMPT[:20], 4, temperature=0)
    broken, whole = taken
    assert (whole.decode[0].n_tokens, whole.prompt[0].n_tokens, broken.prompt[0].n_tokens) == (3, 20, 20)


#
# the command
#


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def counted_in(path: Path) -> tuple[int, int]:
    """Tokens of decode and of prompts in the cache, of the first layer."""
    model = model_info(read_gguf(path))
    routing = read_routing(model.fingerprint, model.n_expert, model.n_expert_used)
    assert routing is not None
    return routing.decode[0].n_tokens, routing.prompt[0].n_tokens


def test_run_and_chat_count_what_they_answer(
    models: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(models, "llama-moe", n_expert_used=2)
    asked = ["--device", "none", "-t", "1", "-n", "40", "--temp", "0", "--no-chat"]
    assert exit_code(["run", str(path), "-p", "Hello", "--json", *asked]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert list(cache.glob("routing-*")) == []
    for times in (1, 2):
        assert exit_code(["run", str(path), "-p", "Hello", "--json", "--count-experts", *asked]) == 0
        counted = json.loads(capfd.readouterr().out)
        assert counted["tokens"] == answer["tokens"]
        n_decode, n_prompt = counted_in(path)
        assert n_prompt == times * answer["n_prompt"]
        assert n_decode in (times * (answer["n_gen"] - 1), times * answer["n_gen"])
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert exit_code(["chat", str(path), "--count-experts", *asked]) == 0
    assert counted_in(path)[0] > n_decode


@pytest.mark.parametrize("command", ["run", "chat"])
def test_what_has_no_experts_is_not_counted(
    command: str, models: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-p", "Hello"] if command == "run" else []
    code = exit_code([command, str(dense(models)), *words, "--no-chat", "--device", "none", "--count-experts"])
    assert code == 2
    assert "--count-experts" in capfd.readouterr().err.splitlines()[-1]


def dense(models: Path) -> Path:
    path = models / "dense.gguf"
    return path if path.is_file() else write_gguf(path, "llama")
