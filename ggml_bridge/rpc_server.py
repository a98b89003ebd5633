"""Serves this machine's CPU as a ggml RPC device, as the child of an RpcServer: ends when its stdin does.

ggml's server has one client at a time and trusts it: anyone who connects can read and write this process's memory. It
reports all of the machine's memory as its own; ggml offers no way to say less.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from ggml_bridge.bridge import load
from ggml_bridge.child import child_main
from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import encode
from ggml_bridge.library import import_interface_only
from ggml_bridge.rpc import probe
from ggml_bridge.threads import Thread

_N_PORTS = 5
"""Ports that are tried: another process may take one before ggml's server does."""


def _serve(request: dict[str, Any], _progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start to serve; returns when the server answers."""
    host = request["host"]
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])  # before any thread starts: all inherit it
    call = load().native.call
    for _ in range(_N_PORTS):
        endpoint = f"{host}:{_free_port(host)}"
        server = Thread(target=call, args=("gb_rpc_serve", encode(endpoint), request["threads"]), daemon=True)
        server.start()
        while server.is_alive():
            time.sleep(0.01)  # it ends at once where it cannot have the port, whose owner may answer in its place
            with contextlib.suppress(BridgeError):
                probe(endpoint, timeout_s=1.0)
                if server.is_alive():
                    return {"endpoint": endpoint}
    raise BridgeError(f"cannot serve at {host}: ggml's server ended on all {_N_PORTS} ports tried")


def _free_port(host: str) -> int:
    """A port that nobody has now. Raises BridgeError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise BridgeError(f"cannot serve at {host}: {error}") from None
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    child_main(_serve, import_interface_only, outlives_thread=True)
