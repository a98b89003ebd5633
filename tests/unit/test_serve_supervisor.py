"""Keeping llama-server running, tried on a stand-in: started, watched, started again, ended with us."""

import os
import signal
from dataclasses import replace

from processes import alive, until
from serving import QUICK, Run, Stub, running

from oallama.core.errors import DeviceError
from oallama.serve.supervisor import last_words


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


def test_a_pause_ends_when_it_is_stopped(tmp_path):
    stub = Stub(tmp_path)
    supervisor = stub.supervisor(patience=replace(QUICK, first_s=600.0, longest_s=600.0))
    with running(supervisor) as run:
        os.kill(supervisor.state.pid, signal.SIGKILL)
        run.until(lambda: bool(stub.said))
    assert run.error is None


def test_last_words_are_those_of_the_error():
    assert last_words(["a", "ggml: error: out of memory", "cleaning up"]) == "ggml: error: out of memory"
    assert last_words(["a", "b", ""]) == "b"
    assert last_words([]) == ""
    assert len(last_words(["x" * 1000])) == 300
