"""Whom a worker serves: the process that started it and its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_helpers import RunHere

from ggml_bridge.errors import BridgeError
from ggml_bridge.library import find_accept
from ggml_bridge.rpc import RpcServer, parse_endpoint, probe
from ggml_bridge.rpc_guard import can_tell, is_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who connects")

CASES = "rpc_cases"
PROBES = "import sys; from ggml_bridge.rpc import probe; probe(sys.argv[1])"


def test_a_stranger_is_turned_away_at_once_while_the_worker_works(run_here: RunHere, tmp_path: Path) -> None:
    """This process is not among the descendants of the child, whose worker it is."""
    enough = tmp_path / "enough"
    seen: list[Any] = []

    def intrude(worker: dict[str, Any]) -> None:
        try:
            seen.append(worker["guarded"])
            for _ in range(20):
                with socket.create_connection(parse_endpoint(worker["endpoint"]), timeout=20) as connection:
                    seen.append(connection.recv(1))
            with pytest.raises(BridgeError, match="no RPC server can be reached"):
                probe(worker["endpoint"], timeout_s=20)
        finally:
            enough.touch()

    result = run_here(CASES, {"case": "a worker of its own", "until": str(enough)}, on_progress=intrude)
    assert seen == [True] + [b""] * 20
    assert result["n_runs"] > 0 and result["nmse"] < 2e-4


@contextlib.contextmanager
def bystander() -> Iterator[int]:
    """A process that starts nothing and connects to nothing."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        with process.stdin:
            yield process.pid


@pytest.mark.parametrize("guarded", [True, False])
def test_whoever_connects_is_served_without_the_guard_alone(guarded: bool) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(find_accept()) if guarded else ""}
    with bystander() as pid:
        command = [sys.executable, "-m", "ggml_bridge.rpc_server", "--parent-pid", str(pid)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            try:
                answer = json.loads(worker.stdout.readline())
                assert answer["guarded"] is guarded
                if guarded:
                    with pytest.raises(BridgeError, match="no RPC server can be reached"):
                        probe(answer["endpoint"], timeout_s=20)
                else:
                    probe(answer["endpoint"], timeout_s=20)
            finally:
                worker.kill()


def test_children_and_their_children_are_served() -> None:
    with RpcServer() as server:
        assert server.guarded
        probe(server.endpoint)
        child = [sys.executable, "-c", PROBES, server.endpoint]
        subprocess.run(child, check=True, timeout=60)
        grandchild = f"import subprocess, sys; subprocess.run({child!r}, check=True)"
        subprocess.run([sys.executable, "-c", grandchild], check=True, timeout=60)


def test_what_else_is_preloaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with RpcServer() as server:
        ours = Path(f"/proc/{server.pid}/maps").read_text().count("libggml_accept")
    monkeypatch.setenv("LD_PRELOAD", "libutil.so.1")
    with RpcServer() as server:
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        assert server.guarded and maps.count("libggml_accept") == ours > 0


def test_several_of_ours_are_served_in_turn() -> None:
    with RpcServer() as server:
        with socket.create_connection(parse_endpoint(server.endpoint)):
            waiting = [threading.Thread(target=probe, args=(server.endpoint, 60.0)) for _ in range(4)]
            for thread in waiting:
                thread.start()
            assert all(thread.is_alive() for thread in waiting), "one client at a time"
        for thread in waiting:
            thread.join()
        probe(server.endpoint)


@contextlib.contextmanager
def connected(listener: socket.socket, port: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection, ours from this port, and theirs."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind(("127.0.0.1", port))
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted


def test_who_left_is_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener) as (client, accepted):
        assert is_of(accepted, os.getpid())
        client.close()
        assert not is_of(accepted, os.getpid())


def test_a_later_connection_from_the_same_port_vouches_for_none_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener) as (client, accepted):
        port = client.getsockname()[1]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # a reset: the port is free at once
        with connected(listener, port) as (_, later):
            assert is_of(later, os.getpid())
            assert not is_of(accepted, os.getpid())


def test_an_unknown_process_cannot_be_told() -> None:
    assert can_tell(os.getpid())
    with bystander() as pid:
        assert can_tell(pid)
    assert not can_tell(pid)
