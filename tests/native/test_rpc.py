"""RPC devices: a worker of our own, and servers that are not there, not ours, or lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from native_helpers import RunHere
from processes import alive, must_end
from rpc_server import RpcServer

import ggml_bridge
from ggml_bridge.errors import BridgeError, ChildDied
from ggml_bridge.rpc import parse_endpoint, probe

CASES = "native_cases"
TESTS = Path(__file__).parents[1]


def test_the_device(run_here: RunHere, server: RpcServer) -> None:
    device = run_here(CASES, {"case": "rpc_device", "endpoint": server.endpoint})
    assert device["again"] == [device["name"]] == ["RPC0"]
    assert (device["type"], device["backend"]) == ("GPU", "RPC")
    assert device["total"] == psutil.virtual_memory().total


def test_kernels_agree_with_numpy(run_here: RunHere, server: RpcServer) -> None:
    results = run_here(CASES, {"case": "rpc_mul_mat", "endpoint": server.endpoint})
    assert len(results) == 9
    assert all(nmse < 2e-4 for nmse in results.values()), results


def test_a_lost_server_is_an_exception_in_the_parent(run_here: RunHere) -> None:
    with RpcServer() as server, pytest.raises(ChildDied) as died:
        run_here(CASES, {"case": "lose_the_server", "endpoint": server.endpoint, "pid": server.pid})
    assert died.value.signal == signal.SIGABRT
    assert "Remote RPC server crashed" in str(died.value)


def test_the_worker_is_pinned_and_ends() -> None:
    cpu = min(os.sched_getaffinity(0))
    with RpcServer(threads=1, cpus=[cpu]) as server:
        probe(server.endpoint)
        assert server.died() is None
        for thread in psutil.Process(server.pid).threads():
            assert os.sched_getaffinity(thread.id) == {cpu}
    assert server.died() is not None
    with pytest.raises(BridgeError, match="cannot reach an RPC server"):
        probe(server.endpoint)


def test_the_worker_dies_with_a_killed_parent() -> None:
    code = "import time; from rpc_server import RpcServer; s = RpcServer(); print(s.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=TESTS) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    must_end(pid)


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(BridgeError, match=r"cannot serve at 192\.0\.2\.1"):
        RpcServer(host="192.0.2.1")  # an address of nobody


def test_a_port_that_another_process_takes_meanwhile_is_left_to_it() -> None:
    code = (
        "import os, socket, rpc_server\n"
        "free = rpc_server.free_port('127.0.0.1')\n"
        "with socket.create_server(('127.0.0.1', 0)) as other:\n"
        "    ports = iter([other.getsockname()[1], free])\n"
        "    rpc_server.free_port = lambda host: next(ports)\n"
        "    answer = rpc_server.answer({'host': '127.0.0.1', 'threads': 1, 'cpus': None}, None)\n"
        "assert answer == {'endpoint': f'127.0.0.1:{free}'}, answer\n"
        "os._exit(0)\n"  # the server's thread never ends
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=TESTS)


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:", ":50052", "::1:50052", "host:0", "host:99999"])
def test_what_is_no_endpoint(bridge: ggml_bridge.Bridge, endpoint: str) -> None:
    with pytest.raises(ValueError, match="is not an RPC endpoint; write host:port"):
        bridge.rpc_add(endpoint)
    assert parse_endpoint("192.168.1.2:50052") == ("192.168.1.2", 50052)


def test_nobody_there(bridge: ggml_bridge.Bridge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BridgeError, match=f"cannot reach an RPC server at 127.0.0.1:{port}"):
        bridge.rpc_add(f"127.0.0.1:{port}")


def test_somebody_who_does_not_answer(bridge: ggml_bridge.Bridge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BridgeError, match=r"within 0\.3 s"):
        bridge.rpc_add(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a compatible ggml RPC server"),
        (b"\x1c" + bytes(7) + b"\x06\x01" + bytes(26), r"speaks protocol 6\.1, but 8\.x is needed"),
        (b"", "it closed the connection"),
    ],
)
def test_somebody_else(bridge: ggml_bridge.Bridge, answer: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BridgeError, match=message):
            bridge.rpc_add(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
