"""Keeping llama-server running, tried on a stand-in: started, watched, started again, ended with us."""

import contextlib
import os
import signal
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from processes import PATIENCE_S, alive, until

from oallama.core.errors import DeviceError
from oallama.run.address import reserved_address
from oallama.run.process import Launch, ServerProcess, last_words
from oallama.serve.supervisor import Patience, Supervisor

STUB = Path(__file__).resolve().parents[1] / "stub_llama_server.py"
QUICK = Patience(first_s=0.05, longest_s=0.2, start_s=120.0, look_s=0.05, answer_s=60.0, end_s=5.0, n_starts=3)


class Kept:
    """The stand-in at a port of its own, which takes orders, and its supervisor in a thread. said: to the user. logged:
    by the program. looks: whether it was healthy. gone: why the device is known to be lost, once
    the program has ended. error: what ended it."""

    def __init__(self, folder, address, device="none", orders="", instead="none", gone=None, **patience):
        self.address = address
        self.orders = folder / "orders"
        self.order(orders)
        self.said, self.logged, self.looks, self.error = [], [], [], None
        self.gone = gone
        self.supervisor = Supervisor(
            self.launch(device),
            None if device == "none" else self.launch(instead),
            self.healthy,
            log=self.said.append,
            server_log=self.logged.append,
            patience=replace(QUICK, **patience),
            instead="the CPU" if instead == "none" else instead,
            device_gone=lambda: self.gone,
        )
        self.state = self.supervisor.state
        self.thread = threading.Thread(target=self._work)

    def launch(self, device):
        where = ("--host", self.address.host, "--port", str(self.address.port))
        environment = {"STUB_ORDERS": str(self.orders), "PYTHONPATH": str(STUB.parents[1])}
        return Launch((sys.executable, str(STUB), *where, "--device", device), environment, device != "none")

    def order(self, words):
        self.orders.write_text(words, encoding="utf-8")

    def healthy(self, pid):
        self.looks.append(self.address.is_healthy(pid, 1.0))
        return self.looks[-1]

    def _work(self):
        try:
            self.supervisor.run()
        except BaseException as error:
            self.error = error

    def until(self, condition):
        until(lambda: not self.thread.is_alive() or condition())
        assert self.thread.is_alive(), self.error

    def until_ready(self, restarts=0):
        self.until(lambda: self.state.status == "ready" and self.state.restarts >= restarts)

    def end(self):
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def reserve():
    """Addresses on this machine that are free, kept from other programs."""
    with contextlib.ExitStack() as stack:
        yield lambda key=None: stack.enter_context(reserved_address("127.0.0.1", 0, key))


@pytest.fixture
def keep(tmp_path, reserve):
    """Supervisors of stand-ins, started and ready, and ended behind the test."""
    made = []

    def keep(ready=True, address=None, **options):
        made.append(Kept(tmp_path, address or reserve(), **options))
        made[-1].thread.start()
        if ready:
            made[-1].until_ready()
        return made[-1]

    yield keep
    for each in made:
        each.supervisor.stop()
        each.end()


def test_it_is_not_ready_while_the_model_is_loading(keep):
    kept = keep(ready=False, orders="loading")
    until(lambda: kept.logged)
    n_looks = len(kept.looks)
    kept.until(lambda: len(kept.looks) > n_looks + 2)
    assert kept.state.status == "starting"
    kept.order("")
    kept.until_ready()
    kept.supervisor.stop()
    assert kept.end() is None


def test_another_program_at_the_port_is_not_taken_for_it(keep):
    error = keep(ready=False, address=keep().address).end()
    assert isinstance(error, DeviceError) and "Address already in use" in str(error)


def test_what_answers_at_its_port_while_it_does_not_listen_is_told_no_key_and_not_believed(keep, reserve):
    """A stranger's program has the port for as long as llama-server has not bound it, and answers as one would."""
    heard = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append((self.path, dict(self.headers)))
            self.send_response(200)
            self.end_headers()

    chosen = reserve("s3cret")
    with HTTPServer((chosen.host, chosen.port), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, args=(0.02,), daemon=True).start()
        kept = keep(ready=False, address=chosen, orders="deaf")
        kept.until(lambda: len(kept.looks) > 3)
        assert kept.state.status == "starting" and not any(kept.looks) and not heard
        stranger.shutdown()
    kept.order("")
    kept.until_ready()
    assert not heard


def test_one_that_neither_answers_nor_computes_is_started_again(keep):
    kept = keep(answer_s=0.5, end_s=0.5)
    first = kept.state.pid
    os.kill(first, signal.SIGSTOP)
    kept.until_ready(restarts=1)
    assert "neither answered nor computed" in kept.state.said
    assert not alive(first)


def test_one_whose_connections_are_all_busy_does_not_hang(keep):
    kept = keep(answer_s=0.5)
    kept.order("busy")
    kept.until(lambda: kept.looks.count(False) > 12)
    assert kept.state.restarts == 0


def test_one_that_fails_again_and_again_is_given_up(keep):
    kept = keep()
    kept.order("fail")
    os.kill(kept.state.pid, signal.SIGKILL)
    error = kept.end()
    assert isinstance(error, DeviceError) and "restarts; last error: " in str(error)
    assert len(kept.said) == QUICK.n_starts - 1


def test_failures_that_lie_far_apart_are_not_counted(keep):
    kept = keep(steady_s=0.0)
    for restarts in range(1, QUICK.n_starts + 2):
        os.kill(kept.state.pid, signal.SIGKILL)
        kept.until_ready(restarts)


def test_a_device_that_is_gone_at_the_next_start_leaves_the_cpu(keep):
    kept = keep(device="RPC0")
    assert kept.state.on_device
    kept.order("fail-device")
    os.kill(kept.state.pid, signal.SIGABRT)
    kept.until(lambda: kept.state.device_lost)
    kept.until_ready()
    assert not kept.state.on_device
    assert "the device was lost" in kept.state.said and "running on the CPU" in kept.state.said
    assert any("the device was lost" in line for line in kept.said)
    assert b"--device none" in kept.logged[-1]


def test_an_rpc_server_that_is_gone_leaves_the_local_device_which_is_given_up_if_it_fails_too(keep):
    kept = keep(device="Emulated0,RPC0", instead="Emulated0")
    kept.order("fail-rpc")
    os.kill(kept.state.pid, signal.SIGABRT)
    kept.until(lambda: kept.state.device_lost)
    kept.until_ready()
    assert kept.state.on_device and "running on Emulated0 until oallama is restarted" in kept.state.said
    told = [line for line in kept.said if "lost" in line]
    assert len(told) == 1 and told[0].endswith("restarting on Emulated0 alone, which is slower")
    assert b"--device Emulated0" in kept.logged[-1] and b"RPC0" not in kept.logged[-1]
    kept.order("fail-device")
    os.kill(kept.state.pid, signal.SIGKILL)
    assert isinstance(kept.end(), DeviceError)


def test_a_server_that_no_longer_answers_when_the_program_has_ended_is_told_in_one_sentence(keep):
    kept = keep(device="Emulated0,RPC0", instead="Emulated0")
    kept.gone = "cannot reach it"
    kept.order("fail-rpc")
    os.kill(kept.state.pid, signal.SIGABRT)
    kept.until_ready(restarts=1)
    assert kept.said == ["the device was lost (cannot reach it); restarting on Emulated0 alone, which is slower"]
    assert kept.state.restarts == 1 and b"--device Emulated0" in kept.logged[-1]


def test_a_server_that_is_lost_while_the_model_is_first_loaded_is_gone_on_without(keep):
    kept = keep(ready=False, device="Emulated0,RPC0", instead="Emulated0", orders="fail-rpc", gone="cannot reach it")
    kept.until_ready(restarts=1)
    assert len(kept.said) == 1 and "restarting on Emulated0 alone" in kept.said[0]


def test_a_pause_ends_when_it_is_stopped(keep):
    kept = keep(first_s=600.0, longest_s=600.0)
    os.kill(kept.state.pid, signal.SIGKILL)
    kept.until(lambda: bool(kept.said))
    kept.supervisor.stop()
    assert kept.end() is None


def test_a_program_that_closes_its_output_goes_on():
    """A script in front of llama-server may send the log elsewhere."""
    command = ("/bin/sh", "-c", "exec > /dev/null 2>&1; sleep 1; exit 7")
    process = ServerProcess(Launch(command, dict(os.environ), uses_device=False))
    until(lambda: process.has_ended)
    assert process.how_it_ended() == "exit code 7"


def test_last_words_are_those_of_the_error():
    assert last_words(["a", "ggml: error: out of memory", "cleaning up"]) == "ggml: error: out of memory"
    assert last_words(["a", "b", ""]) == "b"
    chain = ["failed to allocate a buffer", "failed to create context", "exiting due to model loading error"]
    assert last_words([f"0.00.019.684 E srv  {line}" for line in chain]) == "srv  failed to allocate a buffer"
    assert last_words([]) == ""
    assert len(last_words(["x" * 1000])) == 300
