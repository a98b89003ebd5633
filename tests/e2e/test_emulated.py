"""The emulated device under the whole of oallama: tells that it is emulated, runs out of memory, is lost, and refuses
what it cannot be. What it computes for plans is in test_split_*.py and test_policies_run.py.

Timed runs need a core of their own; how long they take is not asserted.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from devices import REAL
from e2e.described_card import slow_cpu_fast_card
from e2e.forced import written
from e2e.logits import ARCHITECTURES, TOKENS, assert_stock, placed_logits
from e2e.plugin_runs import loaded, logits_of
from processes import here

from oallama.core.errors import DeviceError, DoesNotFit
from oallama.core.units import MIB
from oallama.device.opening import device_pointers, list_devices, open_device
from oallama.placer import Given, Placer

needs_a_core = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core: a device that keeps time needs one of its own"
)


@pytest.fixture
def model(models: Path) -> Path:
    return written(models, "llama", weight_type="Q4_0")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stock_llama_cpp_computes_on_it_what_the_cpu_does(arch: str, models: Path) -> None:
    """With all layers there, and with the output alone."""
    path = written(models, arch, weight_type="F16")
    with open_device(REAL) as device:
        for n_gpu_layers in (999, 1):
            pointers = device_pointers([device.name])
            with loaded(path, devices=pointers, n_gpu_layers=n_gpu_layers, use_extra_bufts=False) as context:
                assert_stock(logits_of(context, TOKENS), path, TOKENS)


def test_a_model_that_does_not_fit_is_said_to(model: Path) -> None:
    placer = Placer.load(model, device=f"emulated:vram={MIB},scale=1,values=real", threads=1)
    whole = Given([operator.name for operator in placer.operators], placer.model.n_layer + 1)
    with pytest.raises((DoesNotFit, DeviceError), match=r"Emulated0|memory"):
        placer.engine(placer.plan(whole, measure=False))


def test_a_lost_device_is_an_error_of_ours(model: Path) -> None:
    profile = slow_cpu_fast_card(model, 1e9)
    placer = Placer.load(model, device=f"{REAL},lost_after=30", threads=1, profile=profile)
    plan = placer.plan("layers", n_prompt=64, n_gen=8)
    with placer.engine(plan) as engine, pytest.raises(DeviceError):
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


@pytest.mark.timed
@needs_a_core
def test_drawn_values_are_finite_and_experts_distinct(models: Path) -> None:
    """Not a token of it means anything, but nothing of it may mislead a CPU either."""
    placer = Placer.load(
        written(models, "qwen3moe", weight_type="F16"), device="emulated:vram=1GiB,scale=1,values=drawn", threads=1
    )
    for on_host in ("no operator", "exps"):
        whole = [operator.name for operator in placer.operators if on_host not in operator.name]
        plan = placer.plan(Given(whole, placer.model.n_layer + 1), 512, 128, measure=False)
        with placer.llama(plan, logits_all=True) as llama:
            assert np.isfinite(placed_logits(llama, TOKENS)).all()


@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("emulated:rtx2060", "rtx3060-12"),
        ("emulated:vram=900TiB,scale=1,values=real", "do not fit"),
        ("emulated:scale=1,cpus=4000", "unknown core 4000"),
        ("emulated:no-such.json,scale=1", "no-such.json"),
        ("emulated:no-such.txt,scale=1,values=real", "no-such.txt"),
    ],
)
def test_what_it_cannot_be_is_one_sentence(model: Path, device: str, what: str) -> None:
    done = here("run", model, "-p", "hello", "-n", 2, "--device", device, "--policy", "layers", code=2)
    assert what in done.stderr and done.stdout == ""


@needs_a_core
def test_threads_leave_it_a_core(model: Path) -> None:
    n = len(os.sched_getaffinity(0))
    done = here("profile", model, "--device", "emulated:scale=1", "--threads", n, code=2)
    assert f"--threads {n}" in done.stderr
