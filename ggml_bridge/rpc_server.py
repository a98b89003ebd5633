"""Serves this machine's CPU as a ggml RPC device, as the child of an RpcServer: ends when its stdin does.

ggml's server has one client at a time and trusts it: anyone who connects can read and write this process's memory. It
reports all of the machine's memory as its own; ggml offers no way to say less.
"""

from __future__ import annotations

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


def _serve(request: dict[str, Any], _progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Start to serve; returns when the server answers."""
    host = request["host"]
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])  # before any thread starts: all inherit it
    try:
        endpoint = f"{host}:{_free_port(host)}"
    except OSError as error:
        raise BridgeError(f"cannot serve at {host}: {error}") from None
    arguments = ("gb_rpc_serve", encode(endpoint), request["threads"])
    server = Thread(target=load().native.call, args=arguments, daemon=True)
    server.start()
    while True:
        try:
            probe(endpoint, timeout_s=1.0)
            return {"endpoint": endpoint}
        except BridgeError:
            if not server.is_alive():
                raise
        time.sleep(0.01)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    child_main(_serve, import_interface_only, outlives_thread=True)
