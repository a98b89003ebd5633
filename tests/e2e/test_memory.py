"""The probe's bytes are those of the real load; what kills, stalls or is refused by llama.cpp becomes an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e.forced import N_UBATCH, Where, forced
from gguf_factory import hostile, write_gguf
from gguf_factory.hostile import LEFT_TO_LLAMA_CPP
from processes import PATIENCE_S, children_with
from seeds import crossed

import ggml_bridge
from oallama.core.errors import DeviceError, ModelFileError, UsageError
from oallama.core.types import NGRAM, Attention, DecodeStep, Workload
from oallama.cost.blocks import F32
from oallama.device.load_params import LoadSettings, ModelParams, apply_context, load_bridge
from oallama.device.native_log import native_log
from oallama.model.gguf_reader import read_gguf
from oallama.model.memory import MODULE, PARTS, NoAllocLoader, NoAllocResult, no_alloc_memory
from oallama.model.operators import operators
from oallama.placer import Placer
from oallama.placer.engine import with_repeated_drafts
from oallama.run.plugin_report import ask_report

api = ggml_bridge.load().libraries.llama_cpp.llama_cpp

PLACES: dict[str, Where] = {
    "attention on the device": lambda op: op.role.startswith("attn"),
    "FFN of layer 0 on the device": lambda op: op.layer == 0 and op.role.startswith("ffn"),
    "all on the device": lambda op: True,
    "only norms and KV on the device": lambda op: False,
}


@pytest.mark.parametrize(("arch", "where"), crossed(["llama", "qwen3moe", "gemma2", "minicpm3"], list(PLACES)))
def test_a_no_alloc_load_says_what_a_load_really_takes(arch: str, where: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", arch, weight_type="Q4_0")
    case = forced(path, "rpc-worker", whole=PLACES[where], n_outputs=1)
    with case.llama(logits_all=False) as llama:
        there = [buffer for buffer in llama.buffers if not buffer.in_host_memory]
        real = [sum(getattr(buffer, part) for buffer in there) for part in PARTS]
        assert real == [case.plan.memory.weights_gpu, case.plan.memory.kv, case.plan.memory.compute]
        assert llama.memory.device_bytes == llama.memory.planned_device_bytes > 0
        assert llama.warnings == ()


@pytest.mark.parametrize("embeds", [False, True])
def test_llama_server_takes_what_is_planned_and_logits_of_more_tokens_only_for_drafts_and_to_embed(
    embeds: bool, tmp_path: Path
) -> None:
    """The emulated card counts what llama-server really has it hold."""
    n_vocab = 8192
    path = write_gguf(tmp_path / "model.gguf", "llama", n_vocab=n_vocab, n_ctx=512)
    case = forced(path, "emulated:rtx3060-12", whole=PLACES["all on the device"], n_outputs=1)
    assert case.plan.memory.compute < F32 * n_vocab * N_UBATCH, "not the logits of a micro-batch"
    n_rows, plan = (N_UBATCH, case.plan) if embeds else (NGRAM.n_draft + 1, replace(case.plan, draft=NGRAM))
    with case.placer.engine(plan, interactive=not embeds) as engine:
        assert len(engine.generate([5] * (N_UBATCH + 9), max_tokens=4, temperature=0).tokens) == 4
        report = ask_report(engine._folder, engine.pid, 10.0)
        assert report is not None and report.emulated is not None
        pooling = 1024 if embeds else 0  # bytes at most, of the mean over tokens, which no load is asked of
        assert report.emulated.device_bytes == pytest.approx(engine.memory.device_bytes, abs=pooling)
        assert engine.memory.device_bytes == engine.memory.planned_device_bytes
        assert engine.warnings == ()
        planned = case.plan.memory
        more = engine.memory.device_bytes - planned.weights_gpu - planned.kv - planned.compute
        logits = F32 * n_vocab * n_rows
        assert 0.7 * logits < more < logits
        with_less = case.with_breakdown(spare=more - 1).plan
        if embeds:
            assert len(engine.embed("a")) == 1
            assert case.placer.with_outputs(with_less, 0) is None
        else:
            with pytest.raises(UsageError, match="no room for the logits of 48 drafts"):
                with_repeated_drafts(case.placer, replace(with_less, draft=NGRAM))
            with pytest.raises(UsageError, match="n_outputs=0"):
                engine.embed("a")


@pytest.mark.parametrize(
    ("step", "n_outputs", "reserved"),
    [
        (DecodeStep(), 1, 1), (DecodeStep(2, n_slots=4), 1, 4), (DecodeStep(1, 3, n_slots=2), 1, 8),
        (DecodeStep(n_slots=2), 49, 98), (DecodeStep(1, 3, n_slots=2), 0, 0),
    ],
)  # fmt: skip
def test_logits_are_reserved_of_each_slots_drafts_and_one_more(step: DecodeStep, n_outputs: int, reserved: int) -> None:
    workload = Workload(1, 1, 512, step=step, n_outputs=n_outputs)
    params = api.llama_context_default_params()
    apply_context(LoadSettings("m.gguf").of(workload), params)
    assert (workload.n_outputs_max, params.n_outputs_max) == (reserved, reserved)
    small = LoadSettings("m.gguf", n_batch=4).of(workload)
    apply_context(small, params)
    assert params.n_outputs_max == min(reserved, 4)


def overridden(path: Path, patterns: tuple[tuple[str, str | None], ...]) -> dict[str, str]:
    """Tensor name -> buffer type, as llama.cpp's own pattern matching decided while loading."""
    bridge = load_bridge()
    placement = ModelParams(LoadSettings(str(path), host_patterns=patterns), (), bridge)
    params = api.llama_model_default_params()
    placement.apply(params)
    params.no_alloc, params.load_mode = True, api.LLAMA_LOAD_MODE_NONE
    with native_log() as log:
        model = api.llama_model_load_from_file(str(path).encode(), params)
        assert model
        api.llama_model_free(model)
    lines = [text.split() for _, text in log.lines if "buffer type overridden to" in text]
    return {words[1]: words[-1] for words in lines}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2", "llama-tied", "qwen3moe", "minicpm3"])
def test_llama_cpp_matches_exactly_the_host_operators_and_their_biases(arch: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", arch, n_layer=12)
    case = forced(path, "rpc-worker", whole=lambda operator: len(operator.name) % 2 == 0, probe=False)
    hosted = {placement.name for placement in case.plan.operators if placement.gg == 0}
    stems, placer = {name.removesuffix(".weight") for name in hosted}, case.placer
    expected = {name for name in placer.tensor_names if name.rpartition(".")[0] in stems}
    assert 0 < len(hosted) < len(case.plan.operators)
    settings = placer.no_alloc_loads.settings(case.plan.workload, placer.placed(case.plan), placer.attention)
    assert set(overridden(path, settings.host_patterns)) == expected


def test_layouts_are_honoured_where_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", weight_type="Q4_0")
    best = load_bridge().cpu_layouts()[0]
    if best == "CPU":
        pytest.skip("the CPU repacks nothing")
    named = overridden(path, ((r"^blk\.0\.ffn_up\.weight$", best), (r"^blk\.1\.ffn_up\.weight$", None)))
    assert named == {"blk.0.ffn_up.weight": best, "blk.1.ffn_up.weight": best}, "None is llama.cpp's own choice"
    plain = overridden(path, ((r"^blk\.0\.ffn_up\.weight$", "CPU"), (r"^blk\.1\.ffn_up\.weight$", best)))
    assert plain == {"blk.0.ffn_up.weight": "CPU", "blk.1.ffn_up.weight": best}


def test_a_file_that_kills_llama_cpp_is_a_model_file_error(tmp_path: Path) -> None:
    path = hostile(tmp_path / "model.gguf", "no blocks")  # SIGABRT in 0.3.36
    with pytest.raises(ModelFileError, match="SIGABRT") as caught:
        no_alloc_memory(LoadSettings(str(path), n_threads=1))
    assert "\n" not in str(caught.value)


def test_with_a_device_in_play_the_same_death_is_a_device_error(tmp_path: Path) -> None:
    path = hostile(tmp_path / "model.gguf", "no blocks")
    with pytest.raises(DeviceError, match="--device none"):
        no_alloc_memory(LoadSettings(str(path), device="rpc-worker", n_gpu_layers=9, n_threads=1))


def test_a_file_that_stalls_llama_cpp_is_a_model_file_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="no answer within 3 s"):
        no_alloc_memory(LoadSettings(str(path), n_threads=1), timeout_s=3)


def test_a_refused_file_tells_llama_cpps_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError, match=r"cannot load .*model\.gguf: bad GGUF version: 0"):
        no_alloc_memory(LoadSettings(str(path), n_threads=1))


@pytest.mark.parametrize("kind", LEFT_TO_LLAMA_CPP)
def test_what_is_left_to_llama_cpp_is_refused_by_it(kind: str, no_alloc_loader: NoAllocLoader, tmp_path: Path) -> None:
    path = hostile(tmp_path / "model.gguf", kind)
    assert operators(read_gguf(path)), "it is read here"
    with pytest.raises(ModelFileError, match=r"cannot load .*model\.gguf") as caught:
        no_alloc_loader.answer(LoadSettings(str(path), n_threads=1))
    assert LEFT_TO_LLAMA_CPP[kind][0] in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def no_alloc_loader() -> Iterator[NoAllocLoader]:
    with NoAllocLoader(at_once=False) as loader:
        yield loader


def test_loads_of_one_process_are_those_of_a_process_each(tmp_path: Path) -> None:
    paths = [
        str(write_gguf(tmp_path / f"{arch}.gguf", arch, weight_type="Q4_0", n_layer=n_layer))
        for arch, n_layer in (("llama", 2), ("qwen3moe", 3))
    ]
    requests = [
        LoadSettings(path, n_ctx=n_ctx, attention=Attention(way), n_threads=1, host_patterns=patterns)
        for path in paths
        for patterns in ((), ((r"^blk\.0\.ffn_up\.weight$", "CPU"),))
        for n_ctx, way in ((256, "on"), (256, "off"), (1024, "off"))
    ]
    with NoAllocLoader() as no_alloc_loader:
        for request in requests:
            no_alloc_loader.ask(request)
        for request in reversed(requests):
            assert no_alloc_loader.answer(request) == no_alloc_memory(request), request


def sizes(result: NoAllocResult) -> dict[str, Any]:
    """Without the names of workers, each of which has its own."""
    splits = result.n_splits_decode
    return {"device": [*map(result.on_device, PARTS)], "host": [*map(result.on_host, PARTS)], "splits": splits}


def test_threads_may_make_loads_of_one_model_at_once(tmp_path: Path) -> None:
    """Each `together` has a process of its own, which ends with it and not with another thread's."""
    path = write_gguf(tmp_path / "model.gguf", "llama")
    placer, other = (Placer.load(path, device="none", threads=1) for _ in range(2))
    before = {child.pid for child in children_with(MODULE)}  # of other tests
    both_began, first_ended = threading.Barrier(2, timeout=PATIENCE_S), threading.Event()

    def processes() -> set[int]:
        return {child.pid for child in children_with(MODULE)} - before

    def on_host(placer: Placer, n_ctx: int) -> tuple[int, int, int]:
        workload = replace(placer.workload(8, 8), n_ctx=n_ctx)
        return placer.no_alloc_loads.on_host(workload, Attention("on"))

    def second() -> list[tuple[int, int, int]]:
        with placer.no_alloc_loads.together():
            both_began.wait()
            found = [on_host(placer, 512)]
            assert first_ended.wait(PATIENCE_S)
            own = processes()
            assert len(own) == 1
            found.append(on_host(placer, 2048))
            assert processes() == own
        return found

    with ThreadPoolExecutor(1) as pool:
        try:
            with placer.no_alloc_loads.together():
                later = pool.submit(second)
                both_began.wait()
                assert len(processes()) == 2
                at_once = [on_host(placer, 256), on_host(placer, 1024)]
        finally:
            first_ended.set()
        at_once += later.result()
    with other.no_alloc_loads.together():
        assert at_once == [on_host(other, n_ctx) for n_ctx in (256, 1024, 512, 2048)]


def test_each_request_in_flight_has_a_recurrent_state(tmp_path: Path) -> None:
    placer = Placer.load(write_gguf(tmp_path / "model.gguf", "mamba2"), device="none", threads=1)
    plans = [placer.plan("cpu", n_prompt=8, n_gen=8, n_parallel=n, measure=False) for n in (1, 4)]
    one, four = (placer.no_alloc_loads.on_host(plan.workload, Attention("on")) for plan in plans)
    assert four[1] == 4 * one[1] > 0


def test_no_alloc_loads_survive_a_file_that_kills_their_process(tmp_path: Path) -> None:
    good = LoadSettings(str(write_gguf(tmp_path / "good.gguf", "llama")), n_threads=1)
    bad = LoadSettings(str(hostile(tmp_path / "bad.gguf", "no blocks")), n_threads=1)
    with NoAllocLoader() as no_alloc_loader:
        no_alloc_loader.ask(bad)
        no_alloc_loader.ask(good)
        with pytest.raises(ModelFileError, match="SIGABRT"):
            no_alloc_loader.answer(bad)
        assert no_alloc_loader.answer(good) == no_alloc_memory(good)
        with pytest.raises(ModelFileError, match="SIGABRT"):
            no_alloc_loader.answer(bad)
