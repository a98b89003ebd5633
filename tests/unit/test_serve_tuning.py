"""Measuring while a server runs: llama-server makes room, and starts again with what won."""

import asyncio
import errno
import os
import subprocess
import sys
from dataclasses import replace

import click
import placement_records as records
import pytest
from processes import children_with
from serving import Stub, ready, running, until

from ggml_bridge.child import PARENT_VARIABLE, python_module
from oallama.cli.main import cli
from oallama.cli.tune import tune_command
from oallama.core.errors import BridgeError, DeviceError
from oallama.core.options import Options
from oallama.serve import tuning as tuning_module
from oallama.serve.launch import with_us
from oallama.serve.tuning import Tune, Tuning

WON = replace(records.served(), reason="what won")


def tuned(tmp_path, monkeypatch, code=0, replan=lambda: WON, launch=lambda stub, served: stub.launch("CUDA0")):
    """What happened, and the state, with a stand-in for `oallama tune`."""
    happened = []

    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor("RPC0")

        async def measure(command, wanted):
            happened.append((command, supervisor.state.phase, supervisor.state.pid, supervisor.state.said))
            return code

        monkeypatch.setattr(tuning_module, "_run", measure)
        tuning = Tuning(
            Tune(("measure", "m"), replan),
            supervisor,
            lambda served: launch(stub, served),
            happened.append,
            stub.said.append,
        )
        async with running(supervisor) as task:
            assert tuning.begin() is None
            assert tuning.begin() is None  # once is enough
            await until(lambda: happened and supervisor.ready.is_set())
            await ready(supervisor, task)
            return stub, replace(supervisor.state)

    stub, state = asyncio.run(run())
    return happened, stub, state


def test_llama_server_makes_room_and_starts_with_what_won(tmp_path, monkeypatch):
    happened, stub, state = tuned(tmp_path, monkeypatch)
    (command, phase, pid, said), taken = happened
    assert (command, phase, pid) == (("measure", "m"), "stopped", None)
    assert "measured" in said
    assert taken is WON
    assert state.phase == "ready" and state.said is None and state.restarts == 0
    assert b"--device CUDA0" in stub.logged[-1]


def test_what_was_served_is_served_again_where_measuring_fails(tmp_path, monkeypatch):
    happened, stub, state = tuned(tmp_path, monkeypatch, code=1)
    assert len(happened) == 1 and state.phase == "ready"
    assert "exit code 1" in stub.said[-1] and b"--device RPC0" in stub.logged[-1]


def test_what_was_served_is_served_again_where_planning_fails(tmp_path, monkeypatch):
    def fails():
        raise DeviceError("the device is away")

    happened, stub, state = tuned(tmp_path, monkeypatch, replan=fails)
    assert len(happened) == 1 and state.phase == "ready"
    assert stub.said[-1] == "the placement stays as it was: the device is away"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), BridgeError("it is not built")])
def test_what_was_served_is_served_again_where_what_won_cannot_be_started(tmp_path, monkeypatch, error):
    def fails(stub, served):
        raise error

    happened, stub, state = tuned(tmp_path, monkeypatch, launch=fails)
    assert len(happened) == 1 and state.phase == "ready" and state.said is None  # and it is not told as being served
    assert stub.said[-1] == f"the placement stays as it was: {error}"
    assert b"--device RPC0" in stub.logged[-1]


def test_after_the_device_was_lost_there_is_nothing_to_measure(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor("RPC0")
    supervisor.state.device_lost = True
    tuning = Tuning(
        Tune((), lambda: WON), supervisor, lambda served: stub.launch(), lambda served: None, stub.said.append
    )
    assert "the device was lost" in tuning.begin()


def test_the_end_of_the_server_ends_it(tmp_path):
    """The real command: it is interrupted while Python starts, or killed."""

    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor("RPC0")
        tune = Tune(tune_command(str(tmp_path / "missing.gguf"), Options(), 1, 1, None), lambda: WON)
        tuning = Tuning(tune, supervisor, lambda served: stub.launch(), lambda served: None, stub.said.append)
        async with running(supervisor):
            tuning.begin()
            await until(lambda: supervisor.state.phase == "stopped")
            await tuning.end()

    asyncio.run(run())
    assert not children_with("tune")


def test_nothing_of_the_working_directory_is_imported(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(7)\n")
    words = list(tune_command("m.gguf", Options(), 1, 1, None))
    for command in ([*words[: words.index("tune") + 1], "--help"], with_us((sys.executable, "-S", "-c", ""), {})[0]):
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
        assert ended.returncode == 0, ended.stderr


def test_tune_is_asked_for_the_same_options():
    options = Options(
        device="rpc-worker:1", vram=6 * 2**30, vram_fill=0.8, gpu_weights=0.5, threads=3, n_ctx=4096, n_ubatch=256,
        type_k="q8_0", type_v="q8_0", flash_attn="on",
    )  # fmt: skip
    words = list(tune_command("m.gguf", options, 100, 20, "p.json"))
    start = [*python_module("oallama"), "tune"]
    assert words[: len(start)] == start
    asked = cli.get_command(click.Context(cli), "tune").make_context("tune", words[len(start) :]).params
    assert {name: asked[name] for name in ("n_prompt", "n_gen", "profile")} == {
        "n_prompt": 100,
        "n_gen": 20,
        "profile": "p.json",
    }
    for name in (
        "device",
        "vram",
        "vram_fill",
        "gpu_weights",
        "threads",
        "n_ctx",
        "n_ubatch",
        "type_k",
        "type_v",
        "flash_attn",
    ):
        assert asked[name] == getattr(options, name), name
    assert tune_command("m.gguf", Options(), 1, 1, None)[-4:] == ("-p", "1", "-n", "1")
    assert tune_command("m.gguf", Options(), 1, 1, None, n_past=4096)[-2:] == ("-d", "4096")
