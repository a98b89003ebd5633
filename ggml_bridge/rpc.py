"""ggml's RPC backend: finding out whether a server answers, and starting one as a worker process of our own.

ggml's client calls abort() whenever a server cannot be reached, does not answer its handshake, or breaks the
connection later; and it waits without end for a server that is busy, since a server has one client at a time. So
`probe` makes the handshake first, with a time limit. A server lost later takes the process down (SIGABRT, last words
"Remote RPC server crashed or returned malformed response"): work with it in a child process to survive that.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ggml_bridge.child import python_module
from ggml_bridge.errors import BridgeError, ChildDied, signal_name
from ggml_bridge.library import find_accept

PROTOCOL_MAJOR = 7
"""Major version of ggml 0.25.3's RPC protocol; servers of another one are refused by it with an abort."""

_HELLO = 14  # RPC_CMD_HELLO
_CAPS_BYTES = 24  # transport capabilities of either side; zeros: plain TCP
_START_TIMEOUT_S = 60.0


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of `host:port`; raises ValueError. ggml takes names and IPv4 addresses, not IPv6."""
    host, _, port = endpoint.rpartition(":")
    if not host or ":" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not an RPC endpoint; write host:port, for example 192.168.1.2:50052")
    return host, int(port)


def probe(endpoint: str, timeout_s: float = 5.0) -> None:
    """Returns when a ggml RPC server of our protocol version answers at host:port; else raises BridgeError."""
    host, port = parse_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(struct.pack("<BQ", _HELLO, _CAPS_BYTES) + bytes(_CAPS_BYTES))
            (size,) = struct.unpack("<Q", _receive(connection, 8))
            answer = _receive(connection, size) if size == 4 + _CAPS_BYTES else b""
    except TimeoutError:
        raise BridgeError(
            f"no RPC server answers at {endpoint} within {timeout_s:g} s; it serves one client at a time, so check that"
            " it runs and has no other client"
        ) from None
    except OSError as error:
        raise BridgeError(f"no RPC server can be reached at {endpoint}: {error.strerror or error}") from None
    if not answer or answer[0] != PROTOCOL_MAJOR:
        version = f"speaks protocol {answer[0]}.{answer[1]}" if answer else "is not a ggml RPC server of our protocol"
        raise BridgeError(f"the server at {endpoint} {version}, but {PROTOCOL_MAJOR}.x is needed (ggml 0.25.3)")


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        chunk = connection.recv(n_bytes - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return data


class RpcServer:
    """A worker process that serves its CPU as an RPC device on this machine, and ends when this process ends.

    It serves this process and its descendants alone where `guarded` is true: on Linux, where /proc tells who connects.
    Elsewhere every process of this machine may connect to it.

    Free everything that lives on its device before `close`: ggml aborts this process when it misses the server.
    """

    def __init__(self, threads: int = 1, cpus: Sequence[int] | None = None, host: str = "127.0.0.1") -> None:
        """Starts the worker with so many threads, pinned to these CPUs; returns when it answers.

        Raises BridgeError or ChildDied when it does not come up.
        """
        accept = find_accept() if sys.platform.startswith("linux") else None
        read_fd, write_fd = os.pipe()
        command = [*python_module("ggml_bridge.rpc_server"), "--host", host, "--threads", str(threads)]
        command += ["--parent-pid", str(os.getpid()), "--ready-fd", str(write_fd)]
        if cpus is not None:
            command += ["--cpus", ",".join(map(str, cpus))]
        try:
            with _preloaded(accept) as (environment, descriptors):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                    pass_fds=(write_fd, *descriptors),
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd, "rb", buffering=0) as ready:
            try:
                answer = self._wait_until_ready(ready)
                self.endpoint: str = answer["endpoint"]
                self.guarded: bool = answer["guarded"]
            except BaseException:
                self.close()
                raise

    def _wait_until_ready(self, ready: Any) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(ready, selectors.EVENT_READ)
            if not selector.select(_START_TIMEOUT_S):
                raise BridgeError(f"the RPC worker did not start within {_START_TIMEOUT_S:g} s")
        line = ready.readline()
        if not line:
            assert self._process.stderr is not None
            tail = self._process.stderr.read().decode(errors="replace")
            raise ChildDied("ggml_bridge.rpc_server", self._process.wait(), tail)
        answer: dict[str, Any] = json.loads(line)
        # nobody reads its log from now on, so that it must not block on writing it
        assert self._process.stderr is not None
        self._process.stderr.close()
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def died(self) -> str | None:
        """How the worker ended, in words; None while it runs."""
        returncode = self._process.poll()
        if returncode is None:
            return None
        return f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)

    def close(self) -> None:
        """Ends the worker; may be called twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stderr is not None:
            with contextlib.suppress(OSError):
                self._process.stderr.close()

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _preloaded(library: Path | None) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Environment and descriptors to start a process with, so that `library` stands before libc in it."""
    if library is None:
        yield dict(os.environ), ()
        return
    descriptor = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # by its descriptor: the loader parts names at spaces and colons, which a path may have
        names = [f"/proc/self/fd/{descriptor}", os.environ.get("LD_PRELOAD", "")]
        yield {**os.environ, "LD_PRELOAD": ":".join(filter(None, names))}, (descriptor,)
    finally:
        os.close(descriptor)
