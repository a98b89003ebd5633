"""Keeping llama-server running, tried on a stand-in: started, watched, started again, ended with us."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from processes import alive, must_end, until
from serving import QUICK, STUB, Run, Stub, running

from oallama.core.errors import DeviceError
from oallama.serve import supervisor as module
from oallama.serve.supervisor import Patience, last_words


def test_it_is_started_said_to_be_ready_and_ended(tmp_path):
    stub, ready = Stub(tmp_path), []
    supervisor = stub.supervisor()
    supervisor.on_ready = lambda: ready.append(stub.healthy())
    with running(supervisor):
        until(lambda: ready)
        state = replace(supervisor.state)
    assert (state.phase, state.restarts, state.said, ready) == ("ready", 0, None, [True])
    assert supervisor.state.phase == "ended" and not alive(state.pid)
    assert stub.logged[0].startswith(b"stub: starting")


def test_it_is_not_ready_while_the_model_is_loading(tmp_path):
    stub, told = Stub(tmp_path), []
    stub.order("loading")
    supervisor = stub.supervisor()
    supervisor.healthy = lambda: told.append(stub.healthy()) or told[-1]
    run = Run(supervisor)
    until(lambda: stub.logged)
    n_told = len(told)
    run.until(lambda: len(told) > n_told + 2)
    assert supervisor.state.phase == "starting"
    stub.order("")
    run.until_ready()
    supervisor.stop()
    assert run.end() is None


def test_another_program_at_the_port_is_not_taken_for_it(tmp_path):
    (tmp_path / "other").mkdir()
    stub, other = Stub(tmp_path), Stub(tmp_path / "other")
    stub.address = other.address
    with running(other.supervisor()):
        error = Run(stub.supervisor()).end()
    assert isinstance(error, DeviceError) and "Address already in use" in str(error)


def test_one_that_is_killed_is_started_again_and_it_is_said_why(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor()
    with running(supervisor) as run:
        first = supervisor.state.pid
        os.kill(first, signal.SIGKILL)
        run.until_ready(restarts=1)
        assert supervisor.state.pid != first
        assert "SIGKILL" in supervisor.state.said
    assert len(stub.said) == 1 and "starting it again in 0.1 s" in stub.said[0]


def test_one_that_neither_answers_nor_computes_is_started_again(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor(patience=replace(QUICK, answer_s=0.5, end_s=0.5))
    with running(supervisor) as run:
        first = supervisor.state.pid
        os.kill(first, signal.SIGSTOP)
        run.until_ready(restarts=1)
        assert "neither answered nor computed" in supervisor.state.said
        assert not alive(first)


def test_one_whose_connections_are_all_busy_does_not_hang(tmp_path):
    stub, looks = Stub(tmp_path), []
    supervisor = stub.supervisor(patience=replace(QUICK, answer_s=0.5))
    with running(supervisor) as run:
        supervisor.healthy = lambda: looks.append(stub.healthy()) or looks[-1]
        stub.order("busy")
        run.until(lambda: looks.count(False) > 12)
        assert supervisor.state.restarts == 0


def test_each_failure_doubles_the_pause_up_to_the_longest():
    patience = Patience(first_s=0.5, longest_s=30.0)
    assert [patience.backoff_s(n) for n in (1, 2, 3, 6, 7, 1000)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


def test_one_that_does_not_start_at_all_is_an_error_with_its_last_words(tmp_path):
    stub = Stub(tmp_path)
    stub.order("fail")
    with pytest.raises(DeviceError, match=r"does not start: exit code 3: error: the device is not here"):
        stub.supervisor().run()


def test_one_that_fails_again_and_again_is_given_up(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor()
    with running(supervisor) as run:
        stub.order("fail")
        os.kill(supervisor.state.pid, signal.SIGKILL)
        error = run.end()
    assert isinstance(error, DeviceError) and "again and again" in str(error)
    assert len(stub.said) == QUICK.n_starts - 1


def test_a_device_that_is_gone_at_the_next_start_leaves_the_cpu(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor(device="RPC0")
    with running(supervisor) as run:
        assert supervisor.state.on_device
        stub.order("fail-device")
        os.kill(supervisor.state.pid, signal.SIGABRT)
        run.until(lambda: supervisor.state.device_lost)
        run.until_ready()
        state = replace(supervisor.state)
    assert not state.on_device
    assert "the device was lost" in state.said and "the CPU computes everything" in state.said
    assert any("the device was lost" in line for line in stub.said)
    assert b"--device none" in stub.logged[-1]


def test_a_device_that_is_known_to_be_lost_ends_the_program_at_once(tmp_path):
    stub, lost = Stub(tmp_path), []
    supervisor = stub.supervisor(device="RPC0", device_lost=lambda: lost[0] if lost else None)
    with running(supervisor) as run:
        first = supervisor.state.pid
        lost.append("its worker is gone")
        run.until(lambda: supervisor.state.device_lost)
        run.until_ready()
        assert not alive(first)
        assert "its worker is gone" in supervisor.state.said and supervisor.state.restarts == 1


def test_a_start_without_a_process_is_tried_again_with_the_device(tmp_path, monkeypatch):
    """As where there is no memory for one: of the device it says nothing."""
    popen, failures = subprocess.Popen, [OSError(errno.EAGAIN, "Resource temporarily unavailable")]

    def failing(*words, **options):
        if failures:
            raise failures.pop()
        return popen(*words, **options)

    stub = Stub(tmp_path)
    supervisor = stub.supervisor(device="RPC0")
    with running(supervisor) as run:
        monkeypatch.setattr(module.subprocess, "Popen", failing)
        os.kill(supervisor.state.pid, signal.SIGKILL)
        run.until_ready(restarts=2)
        assert supervisor.state.on_device
    assert "it cannot be started: Resource temporarily unavailable" in stub.said[-1]


def test_a_pause_ends_when_it_is_stopped(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor(patience=replace(QUICK, first_s=600.0, longest_s=600.0))
    with running(supervisor) as run:
        os.kill(supervisor.state.pid, signal.SIGKILL)
        run.until(lambda: bool(stub.said))
    assert run.error is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_a_parent_that_is_killed_leaves_no_child(tmp_path):
    tests = [str(STUB.parent / "unit"), str(STUB.parent)]
    code = (
        f"import sys; sys.path[:0] = {tests!r}\n"
        "from pathlib import Path\nfrom serving import Stub\n"
        f"supervisor = Stub(Path({str(tmp_path)!r})).supervisor()\n"
        "supervisor.on_ready = lambda: print(supervisor.state.pid, flush=True)\n"
        "supervisor.run()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    must_end(pid)


def test_last_words_are_those_of_the_error():
    assert last_words(["a", "ggml: error: out of memory", "cleaning up"]) == "ggml: error: out of memory"
    assert last_words(["a", "b", ""]) == "b"
    assert last_words([]) == ""
    assert len(last_words(["x" * 1000])) == 300
