"""Keeping llama-server running, tried on a stand-in: started, watched, started again, ended with us."""

import asyncio
import errno
import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from processes import alive, must_end
from serving import QUICK, STUB, Stub, ready, running, until

from oallama.core.errors import DeviceError
from oallama.serve.supervisor import Patience, last_words


def test_it_is_started_said_to_be_ready_and_ended(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor()
        async with running(supervisor):
            state = replace(supervisor.state)
            assert await supervisor.answers()
        return stub, supervisor, state

    stub, supervisor, state = asyncio.run(run())
    assert (state.phase, state.restarts, state.said) == ("ready", 0, None)
    assert supervisor.state.phase == "ended" and not supervisor.ready.is_set()
    assert not alive(state.pid)
    assert stub.logged[0].startswith(b"stub: starting")


def test_it_is_not_ready_while_the_model_is_loading(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        stub.order("loading")
        supervisor = stub.supervisor()
        told, answers = [], supervisor.answers

        async def heard():
            told.append(await answers())
            return told[-1]

        supervisor.answers = heard
        task = asyncio.create_task(supervisor.run())
        await until(lambda: stub.logged)
        n_told = len(told)
        await until(lambda: len(told) > n_told + 1)  # of which one was asked after it could answer
        phase, is_ready = supervisor.state.phase, supervisor.ready.is_set()
        stub.order("")
        await ready(supervisor, task)
        task.cancel()
        await asyncio.wait({task})
        return phase, is_ready

    assert asyncio.run(run()) == ("starting", False)


def test_one_that_is_killed_is_started_again_and_it_is_said_why(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor()
        async with running(supervisor) as task:
            first = supervisor.state.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: supervisor.state.restarts == 1)
            await ready(supervisor, task)
            return stub, first, supervisor.state.pid, replace(supervisor.state)

    stub, first, second, state = asyncio.run(run())
    assert first != second
    assert state.phase == "ready" and state.restarts == 1
    assert "SIGKILL" in state.said
    assert len(stub.said) == 1 and "starting it again in 0.1 s" in stub.said[0]


def test_one_that_answers_nobody_is_ended_and_started_again(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor(patience=replace(QUICK, answer_s=0.5))
        async with running(supervisor) as task:
            first = supervisor.state.pid
            stub.order("loading")
            await until(lambda: supervisor.state.restarts == 1)
            stub.order("")
            await ready(supervisor, task)
            return supervisor.state.said, first

    said, first = asyncio.run(run())
    assert "answered nobody" in said
    assert not alive(first)


def test_one_that_sends_answers_is_not_asked_and_does_not_hang(tmp_path):
    async def run():
        stub, heard = Stub(tmp_path), [True]
        patience = replace(QUICK, answer_s=0.5)
        supervisor = stub.supervisor(patience=patience, heard=lambda: heard[0])
        async with running(supervisor):
            stub.order("loading")
            await asyncio.sleep(2 * patience.answer_s)
            restarts = supervisor.state.restarts
            heard[0] = False
            await until(lambda: supervisor.state.restarts == 1)
            return restarts

    assert asyncio.run(run()) == 0


def test_each_failure_doubles_the_pause_up_to_the_longest():
    patience = Patience(first_s=0.5, longest_s=30.0)
    assert [patience.backoff_s(n) for n in (1, 2, 3, 6, 7, 1000)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


def test_one_that_does_not_start_at_all_is_an_error_with_its_last_words(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        stub.order("fail")
        await stub.supervisor().run()

    with pytest.raises(DeviceError, match=r"does not start: exit code 3: error: the device is not here"):
        asyncio.run(run())


def test_one_that_fails_again_and_again_is_given_up(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor()
        async with running(supervisor) as task:
            stub.order("fail")
            os.kill(supervisor.state.pid, signal.SIGKILL)
            await asyncio.wait({task}, timeout=60)
            return task.exception(), len(stub.said)

    error, n_said = asyncio.run(run())
    assert isinstance(error, DeviceError) and "again and again" in str(error)
    assert n_said == QUICK.n_starts - 1


def test_a_device_that_is_gone_at_the_next_start_leaves_the_cpu(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor(device="RPC0")
        async with running(supervisor) as task:
            had = supervisor.state.on_device
            stub.order("fail-device")
            os.kill(supervisor.state.pid, signal.SIGABRT)
            await until(lambda: not supervisor.state.on_device)
            await ready(supervisor, task)
            return stub, had, replace(supervisor.state)

    stub, had, state = asyncio.run(run())
    assert had and not state.on_device and state.phase == "ready"
    assert "the device was lost" in state.said and "the CPU computes everything" in state.said
    assert any("the device was lost" in line for line in stub.said)
    assert b"--device none" in stub.logged[-1]


def test_a_device_that_is_known_to_be_lost_ends_the_program_at_once(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        lost = []
        supervisor = stub.supervisor(device="RPC0", device_lost=lambda: lost[0] if lost else None)
        async with running(supervisor) as task:
            first = supervisor.state.pid
            lost.append("its worker is gone")
            await until(lambda: not supervisor.state.on_device)
            await ready(supervisor, task)
            return first, replace(supervisor.state)

    first, state = asyncio.run(run())
    assert not alive(first)
    assert "its worker is gone" in state.said and state.restarts == 1


def test_it_can_be_stopped_for_a_while_and_started_in_another_way(tmp_path):
    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor()
        async with running(supervisor) as task:
            first = supervisor.state.pid
            await supervisor.pause()
            gone = not alive(first) and supervisor.state.phase == "stopped"
            supervisor.resume(stub.launch("CUDA0"))
            await ready(supervisor, task)
            return gone, replace(supervisor.state), stub

    gone, state, stub = asyncio.run(run())
    assert gone and state.on_device and state.restarts == 0
    assert b"--device CUDA0" in stub.logged[-1]


def test_a_start_without_a_process_is_tried_again_with_the_device(tmp_path, monkeypatch):
    """As where there is no memory for one: of the device it says nothing."""
    create, failures = asyncio.create_subprocess_exec, []

    async def failing(*words, **options):
        if failures:
            raise failures.pop()
        return await create(*words, **options)

    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor(device="RPC0")
        async with running(supervisor) as task:
            monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)
            failures.append(OSError(errno.EAGAIN, "Resource temporarily unavailable"))
            os.kill(supervisor.state.pid, signal.SIGKILL)
            await until(lambda: supervisor.state.restarts == 2)
            await ready(supervisor, task)
            return stub, replace(supervisor.state)

    stub, state = asyncio.run(run())
    assert state.phase == "ready" and state.on_device
    assert "it cannot be started: Resource temporarily unavailable" in stub.said[-1]


def test_it_can_be_stopped_in_the_moment_in_which_it_is_started(tmp_path, monkeypatch):
    create, pauses, pids = asyncio.create_subprocess_exec, [], []

    async def run():
        stub = Stub(tmp_path)
        supervisor = stub.supervisor()

        async def paused(*words, **options):
            process = await create(*words, **options)
            if not pauses:
                pids.append(process.pid)
                pauses.append(asyncio.create_task(supervisor.pause()))
                await asyncio.sleep(0)  # until it waits for the end of what is not there yet
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", paused)
        task = asyncio.create_task(supervisor.run())
        await until(lambda: pauses)
        await asyncio.wait_for(pauses[0], 60)
        phase, is_ready, gone = supervisor.state.phase, supervisor.ready.is_set(), not alive(pids[0])
        supervisor.resume()
        await ready(supervisor, task)
        task.cancel()
        await asyncio.wait({task})
        return phase, is_ready, gone

    assert asyncio.run(run()) == ("stopped", False, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_parent_that_is_killed_leaves_no_child(tmp_path):
    code = (
        f"import asyncio, sys; sys.path.insert(0, {str(STUB.parent / 'unit')!r})\n"
        "from pathlib import Path\nfrom serving import Stub, running\n"
        "async def run():\n"
        f"    supervisor = Stub(Path({str(tmp_path)!r})).supervisor()\n"
        "    async with running(supervisor):\n"
        "        print(supervisor.state.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    must_end(pid)


def test_looking_at_it_again_and_again_holds_nothing(tmp_path):
    """Process.wait() keeps what was cancelled of it, so one for each look would stay until the program ends."""

    async def run():
        supervisor = Stub(tmp_path).supervisor(patience=replace(QUICK, look_s=0.001))
        looks, answers = [], supervisor.answers

        async def counted():
            looks.append(None)
            return await answers()

        supervisor.answers = counted
        async with running(supervisor):
            held = []
            for n_looks in (50, 250):
                await until(lambda: len(looks) >= n_looks)  # noqa: B023 - called here
                gc.collect()
                held.append(sum(isinstance(one, asyncio.Future) for one in gc.get_objects()))
            return held

    before, after = asyncio.run(run())
    assert after < before + 50


def test_last_words_are_those_of_the_error():
    assert last_words(["a", "ggml: error: out of memory", "cleaning up"]) == "ggml: error: out of memory"
    assert last_words(["a", "b", ""]) == "b"
    assert last_words([]) == ""
    assert len(last_words(["x" * 1000])) == 300
