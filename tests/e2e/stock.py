"""The pinned llama.cpp's own programs, where set-up built them, and an RPC server of theirs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ggml_bridge.errors import BridgeError
from ggml_bridge.library import library_folder

START_S = 120.0


def _find() -> Path | None:
    """Their folder, where set-up put them."""
    with contextlib.suppress(BridgeError):
        if (library_folder() / "test-backend-ops").is_file():
            return library_folder()
    return None


PROGRAMS = _find()

NO_PROGRAMS = "llama.cpp was not compiled by set-up, so it has no programs"
needs_programs = pytest.mark.skipif(PROGRAMS is None, reason=NO_PROGRAMS)


def program(name: str) -> str:
    assert PROGRAMS is not None
    return str(PROGRAMS / name)


def environment(**settings: str) -> dict[str, str]:
    """An environment in which a shell finds the programs by name, and in which no plugin is set but by `settings`."""
    assert PROGRAMS is not None
    kept = {name: value for name, value in os.environ.items() if name not in ("GGML_BACKEND_PATH", "OALLAMA_PLAN")}
    return {**kept, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", **settings}


def free_port() -> int:
    """A port below those that the system takes for connections, so that it is still free when it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class RpcServer:
    """ggml-rpc-server on 127.0.0.1, one thread; its log tells what it was asked to hold."""

    def __init__(self, log: Path) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._log = log

    def allocated(self) -> list[int]:
        """Bytes of every buffer that clients asked for so far."""
        lines = self._log.read_text(encoding="utf-8", errors="replace")
        return [int(size) for size in re.findall(r"\[alloc_buffer\] device: 0, size: (\d+) -> remote_ptr", lines)]


@contextlib.contextmanager
def rpc_server(folder: Path) -> Iterator[RpcServer]:
    server = RpcServer(folder / "rpc-server.log")
    host, port = server.endpoint.split(":")
    command = [program("ggml-rpc-server"), "-H", host, "-p", port, "-t", "1"]
    with (folder / "rpc-server.log").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment(GGML_RPC_DEBUG="1"))
        try:
            wait_for(lambda: _listens(host, int(port)), child)
            yield server
        finally:
            child.kill()
            child.wait()


class LlamaServer:
    """A running llama-server of one thread."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self._url, self._log = process, url, log

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """End it as a service manager does."""
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(START_S)

    @property
    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(self, **body: Any) -> dict[str, Any]:
        """Its greedy answer, with the likeliest tokens of each place."""
        text = json.dumps({"temperature": 0, "n_probs": 3, "seed": 1, **body})
        request = urllib.request.Request(f"{self._url}/completion", text.encode())
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def llama_server(line: str, log: Path, **settings: str) -> Iterator[LlamaServer]:
    """Start an exported line from a shell, as users do. settings: of the environment."""
    port = free_port()
    command = ["bash", "-c", f"{line} --host 127.0.0.1 --port {port} -t 1"]
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=environment(**settings), start_new_session=True)
        server = LlamaServer(child, f"http://127.0.0.1:{port}", log)
        try:
            wait_for(lambda: server.answers, child)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait_for(ready: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    """Until `ready()` is true; fails when the child ends or START_S have passed."""
    deadline = time.monotonic() + START_S
    while not ready():
        assert child.poll() is None, f"{child.args} ended with status {child.returncode}"
        assert time.monotonic() < deadline, f"{child.args} is not ready after {START_S:.0f} s"
        time.sleep(0.05)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
