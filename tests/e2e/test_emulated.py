"""The emulated device under the whole of oallama: streams because that pays, tells that it is emulated, runs out of
memory, is lost, and refuses what it cannot be.

Plans are made of described profiles, so that they do not depend on how busy this machine is. Timed runs need a core of
their own; how long they take is not asserted.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.logits import ARCHITECTURES, EXACT_NMSE, QUANTISED_NMSE, TOKENS, nmse, stock_logits
from e2e.plugin_runs import loaded, logits_of
from gguf_factory import write_gguf
from processes import here

from oallama.core.errors import DeviceError, DoesNotFit
from oallama.core.units import MIB
from oallama.device.opening import device_pointer, list_devices, open_device
from oallama.placer import Given, Placer
from oallama.plan.plan import Plan

pytestmark = pytest.mark.timed

needs_a_core = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core: a device that keeps time needs one of its own"
)

REAL = "emulated:vram=1GiB,scale=1,values=real"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of more layers than the ring has slots."""
    return write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", "llama", weight_type="Q4_0", n_layer=4)


def plan_on(model: Path, link_bytes_per_s: float) -> tuple[Placer, Plan]:
    profile = slow_cpu_fast_card(model, link_bytes_per_s)
    placer = Placer.load(model, device=REAL, profile=profile, gpu_weights=0.3, threads=1)
    return placer, placer.plan("scheinfer", n_prompt=256, n_gen=32)


def test_what_pays_is_streamed_and_computes_the_same(model: Path) -> None:
    placer, plan = plan_on(model, 1e9)
    streamed = sum(o.bytes * p.cg for o, p in zip(placer.operators, plan.operators, strict=True))
    assert streamed > 0.2 * sum(o.bytes for o in placer.operators)
    with placer.engine(plan, progress=False) as engine:
        assert nmse(engine.logits(TOKENS), stock_logits(model, TOKENS)) <= QUANTISED_NMSE
        run = engine.generate(list(range(1, 40)), max_tokens=4, temperature=0)
        assert run.n_gen == 4 and engine.split_stats is not None
        assert engine.split_stats.decode.bytes_streamed > 0 and engine.split_stats.prompt.bytes_streamed > 0


def test_a_plan_with_one_slot_computes_what_stock_does(model: Path) -> None:
    """Chosen where memory is short: the ring is as long as a block, whose successors overwrite it one after another."""
    profile = slow_cpu_fast_card(model, 3e8)
    placer = Placer.load(model, device=REAL, profile=profile, vram=1700 * 1024, threads=1)
    plan = placer.plan("scheinfer", n_prompt=1, n_gen=32)
    streaming = plan.streaming
    assert streaming is not None and streaming.n_slots == 1
    streamed = [o.bytes * p.cg for o, p in zip(placer.operators, plan.operators, strict=True) if p.cg]
    assert len(streamed) > 4 and max(streamed) <= streaming.ring_bytes < sum(streamed) / 2
    with placer.engine(plan, progress=False) as engine:
        assert nmse(engine.logits(TOKENS), stock_logits(model, TOKENS)) <= QUANTISED_NMSE
        assert engine.memory.device_bytes <= engine.memory.planned_device_bytes
        engine.generate([1, 2, 3], max_tokens=4, temperature=0)
        assert engine.split_stats is not None
        assert engine.split_stats.decode.bytes_streamed > 2 * sum(streamed), "of three tokens each fills it anew"


def test_the_link_decides_how_much_is_streamed(model: Path) -> None:
    """A link that is too slow to help streams nothing, and the faster it is the more it helps."""
    shares, seconds = [], []
    for rate in (1e6, 3e8, 1e9):
        placer, plan = plan_on(model, rate)
        shares.append(sum(o.bytes * p.cg for o, p in zip(placer.operators, plan.operators, strict=True)))
        assert plan.predicted is not None
        seconds.append(plan.predicted.total_s)
    assert shares[0] == 0 < min(shares[1:])
    assert seconds[0] > seconds[1] > seconds[2]


def test_whole_models_on_the_device_are_stock_s(model: Path) -> None:
    placer = Placer.load(model, device=REAL, threads=1, profile=slow_cpu_fast_card(model, 1e9))
    with placer.engine(placer.plan("layers", n_prompt=64, n_gen=8), progress=False) as engine:
        assert engine.memory.device_bytes > placer.model.file_bytes // 2
        assert nmse(engine.logits(TOKENS), stock_logits(model, TOKENS)) <= QUANTISED_NMSE


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stock_llama_cpp_computes_on_it_what_the_cpu_does(arch: str, tmp_path: Path) -> None:
    """With all layers there, and with the output alone."""
    path = write_gguf(tmp_path / "model.gguf", arch, weight_type="F16")
    with loaded(path) as context:
        wanted = logits_of(context, TOKENS)
    with open_device(REAL) as device:
        for n_gpu_layers in (999, 1):
            pointers = [device_pointer(device.name)]
            with loaded(path, devices=pointers, n_gpu_layers=n_gpu_layers, use_extra_bufts=False) as context:
                assert nmse(logits_of(context, TOKENS), wanted) <= EXACT_NMSE


def test_a_model_that_does_not_fit_is_said_to(model: Path) -> None:
    small = f"emulated:vram={MIB},scale=1,values=real"
    placer = Placer.load(model, device=small, threads=1, profile=slow_cpu_fast_card(model, 1e9))
    names = [operator.name for operator in placer.operators]
    with pytest.raises((DoesNotFit, DeviceError), match=r"Emulated0|memory"):
        placer.engine(placer.plan(Given(names, placer.model.n_layer + 1), 512, 128), progress=False)


def test_a_lost_device_is_an_error_of_ours(model: Path) -> None:
    spec = "emulated:vram=1GiB,scale=1,values=real,lost_after=30"
    placer = Placer.load(model, device=spec, threads=1, profile=slow_cpu_fast_card(model, 1e9))
    plan = placer.plan("layers", n_prompt=64, n_gen=8)
    with placer.engine(plan, progress=False) as engine, pytest.raises(DeviceError):
        for _ in range(40):
            engine.generate(list(range(1, 40)), max_tokens=4, temperature=0)
    with open_device(REAL) as device:
        assert device.name == "Emulated0", "what was lost can be opened anew"


def test_it_is_there_only_while_it_is_open() -> None:
    with open_device(REAL) as device:
        assert device.info is not None and "emulated" in device.info.description
        assert "Emulated0" in [info.name for info in list_devices()]
        with open_device("auto") as chosen:
            assert chosen.name != "Emulated0", "nobody asked for it"
    assert "Emulated0" not in [info.name for info in list_devices()]


@needs_a_core
def test_drawn_values_are_finite_and_experts_distinct(tmp_path: Path) -> None:
    """Not a token of it means anything, but nothing of it may mislead a CPU either."""
    path = write_gguf(tmp_path / "moe.gguf", "qwen3moe", weight_type="F16")
    spec = "emulated:vram=1GiB,scale=1,values=drawn"
    placer = Placer.load(path, device=spec, threads=1, profile=slow_cpu_fast_card(path, 1e9))
    for names in ([], [o.name for o in placer.operators if "exps" in o.name]):
        whole = [o.name for o in placer.operators if o.name not in names]
        plan = placer.plan(Given(whole, placer.model.n_layer + 1), 512, 128)
        with placer.engine(plan, progress=False) as engine:
            assert np.isfinite(engine.logits(TOKENS)).all()


@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("emulated:rtx2060", "rtx3060-12"),
        ("emulated:rtx3090,gbps=0", "above 0"),
        ("emulated:vram=900TiB,scale=1,values=real", "do not fit"),
        ("emulated:scale=1,cpus=4000", "no core 4000"),
        ("emulated:no-such.json,scale=1", "no-such.json"),
        ("emulated:no-such.txt,scale=1,values=real", "no-such.txt"),
    ],
)
def test_what_it_cannot_be_is_one_sentence(model: Path, device: str, what: str) -> None:
    done = here("run", model, "-p", "hello", "-n", 2, "--device", device, "--policy", "layers", code=2)
    assert what in done.stderr and done.stdout == "" and "Traceback" not in done.stderr


@needs_a_core
def test_threads_leave_it_a_core(model: Path) -> None:
    n = len(os.sched_getaffinity(0))
    done = here("profile", model, "--device", "emulated:scale=1", "--threads", n, code=2)
    assert f"--threads {n}" in done.stderr
