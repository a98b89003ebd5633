"""Serves this machine's CPU as a ggml RPC device, as the child of an RpcServer: ends when its stdin does.

Prints one JSON line {"endpoint": "host:port", "pid": n} to stdout when it answers; all else goes to stderr. ggml's
server has one client at a time and trusts it: anyone who connects can read and write this process's memory, so bind it
to 127.0.0.1 or to a network you trust. It reports all of the machine's memory as its own; ggml offers no way to say
less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time

from ggml_bridge.bridge import load
from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import encode
from ggml_bridge.rpc import probe
from ggml_bridge.threads import Thread


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", help="IPv4 address to listen at")
    parser.add_argument("--threads", type=int, help="threads to compute with")
    parser.add_argument("--cpus", type=int, nargs="*", help="CPUs to run on (default: all)")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, options.cpus)  # before any thread starts: all inherit it
    Thread(target=_leave_with_stdin, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait for the native call to return
    ready_fd = os.dup(1)
    os.dup2(2, 1)  # ggml's server prints to stdout
    try:
        endpoint = f"{options.host}:{_free_port(options.host)}"
        bridge = load()
        Thread(target=_announce, args=(endpoint, ready_fd), daemon=True).start()
        bridge.native.call("gb_rpc_serve", encode(endpoint), options.threads)
    except (BridgeError, OSError) as error:
        print(f"rpc_server: cannot serve at {options.host}: {error}", file=sys.stderr)
    return 1


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def _announce(endpoint: str, ready_fd: int) -> None:
    """Write the endpoint once a server answers there."""
    try:
        while True:
            with contextlib.suppress(BridgeError):
                probe(endpoint, timeout_s=1.0)
                os.write(ready_fd, (json.dumps({"endpoint": endpoint, "pid": os.getpid()}) + "\n").encode())
                os.close(ready_fd)
                return
            time.sleep(0.01)
    except Exception as error:  # memory that is refused; whoever waits for the line shall not wait in vain
        print(f"rpc_server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _leave_with_stdin() -> None:
    """End this process when stdin does: with the process that started it, however that ends."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
