"""ggml's RPC server over this machine's CPU, as a child process.

It has one client at a time and trusts it: anyone who connects can read and write its memory. It reports all of the
machine's memory as its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ggml_bridge.bridge import load
from ggml_bridge.child import Child, child_main
from ggml_bridge.errors import BridgeError, signal_name
from ggml_bridge.library import import_interface_only, soname
from ggml_bridge.rpc import probe
from ggml_bridge.threads import Thread

START_TIMEOUT_S = 60.0
N_PORTS = 5  # that are tried: another process may take one before ggml's server does


class RpcServer:
    """A server with so many threads, pinned to these CPUs, which ends with the thread that starts it.

    Free everything that lives on its device before `close`: ggml aborts this process when it misses the server.
    """

    def __init__(self, threads: int = 1, cpus: Sequence[int] | None = None, host: str = "127.0.0.1") -> None:
        """Return when it answers. Raises BridgeError."""
        folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self._child = Child("rpc_server", {"PYTHONPATH": os.pathsep.join(filter(None, folders))})
        self.pid = self._child.pid
        try:
            request = {"host": host, "threads": threads, "cpus": cpus and list(cpus)}
            self.endpoint: str = self._child.ask(request, timeout_s=START_TIMEOUT_S)["endpoint"]
        except BaseException:
            self.close()
            raise

    def died(self) -> str | None:
        """Tell in words how it ended; None while it runs."""
        returncode = self._child.returncode
        if returncode is None:
            return None
        return f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)

    def close(self) -> None:
        """End it; may be called twice."""
        self._child.end(signal.SIGKILL)

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#
# the child's side
#


def answer(request: dict[str, Any], _progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start to serve; returns when the server answers."""
    host = request["host"]
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])  # before any thread starts: all inherit it
    load()
    for _ in range(N_PORTS):
        endpoint = f"{host}:{free_port(host)}"
        server = Thread(target=serve, args=(endpoint, request["threads"]), daemon=True)
        server.start()
        while server.is_alive():
            time.sleep(0.01)  # it ends at once where it cannot have the port, whose owner may answer in its place
            with contextlib.suppress(BridgeError):
                probe(endpoint, timeout_s=1.0)
                if server.is_alive():
                    return {"endpoint": endpoint}
    raise BridgeError(f"cannot serve at {host}: ggml's server ended on all {N_PORTS} ports tried")


def serve(endpoint: str, threads: int) -> None:
    """Serve the CPU; returns only on failure."""
    bridge = load()
    library = bridge.libraries.folder / soname("ggml-rpc")
    start = ctypes.CDLL(str(library if library.is_file() else library.with_suffix(""))).ggml_backend_rpc_start_server
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    start.argtypes, start.restype = [ctypes.c_char_p, ctypes.c_char_p, size, size, ctypes.POINTER(pointer)], None
    start(endpoint.encode(), None, threads, 1, ctypes.byref(pointer(bridge.device("CPU").pointer)))


def free_port(host: str) -> int:
    """A port that nobody has now. Raises BridgeError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise BridgeError(f"cannot serve at {host}: {error}") from None
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    child_main(answer, import_interface_only)
