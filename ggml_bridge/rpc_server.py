"""Serves this machine's CPU as a ggml RPC device: python -m ggml_bridge.rpc_server --threads 1 --cpus 1

Prints one JSON line {"endpoint": "host:port", "pid": n, "guarded": false} when it answers (to --ready-fd if given, else
to stdout); all else goes to stderr. With --parent-pid it ends when that process ends, however that happens, and serves
that process and its descendants alone where `guarded` is true (rpc_guard.py). ggml's server has one client at a time
and trusts it: anyone who is served can read and write this process' memory, so bind it to 127.0.0.1 or to a network you
trust. It reports all of the machine's memory as its own; ggml offers no way to say less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ggml_bridge.bridge import load
from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import encode
from ggml_bridge.rpc import probe
from ggml_bridge.rpc_guard import ConnectionGuard
from ggml_bridge.threads import Thread

_BIND_ATTEMPTS = 5
_POLL_S = 0.2
_LISTEN = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.cpus:
        os.sched_setaffinity(0, options.cpus)  # before any thread starts: all inherit it
    guard = None
    if options.parent_pid is not None:
        guard = ConnectionGuard(options.parent_pid)
        Thread(target=_leave_with, args=(options.parent_pid,), daemon=True).start()
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C is for the parent, who still needs this worker to end well
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait for the native call to return
    ready_fd = options.ready_fd if options.ready_fd is not None else os.dup(1)
    os.dup2(2, 1)  # ggml's server prints to stdout
    failure = ""
    try:
        bridge = load()
        guarded = guard is not None and guard.install()
        for _ in range(_BIND_ATTEMPTS if options.port == 0 else 1):
            port = _choose_port(options.host, options.port)
            endpoint, ended = f"{options.host}:{port}", threading.Event()
            Thread(target=_announce, args=(endpoint, port, guarded, ready_fd, ended), daemon=True).start()
            try:
                bridge.native.call("gb_rpc_serve", encode(endpoint), options.threads)
            except BridgeError as error:
                failure = str(error)  # somebody else took the port meanwhile
            finally:
                ended.set()
    except (BridgeError, OSError) as error:
        failure = f"cannot serve at {options.host}:{options.port}: {error}"
    print(f"rpc_server: {failure}", file=sys.stderr)
    return 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ggml_bridge.rpc_server", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--host", default="127.0.0.1", help="IPv4 address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 (default): any free port")
    parser.add_argument("--threads", type=int, default=1, help="threads to compute with (default %(default)s)")
    parser.add_argument("--cpus", type=_cpu_list, help="CPUs to run on, for example 1 or 0-3,8")
    parser.add_argument("--parent-pid", type=int, help="end with this process, and serve it and its descendants alone")
    parser.add_argument("--ready-fd", type=int, help="file descriptor for the line that says it answers")
    return parser.parse_args(arguments)


def _cpu_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _choose_port(host: str, port: int) -> int:
    """That port, or any free one for 0; raises OSError when it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        chosen: int = listener.getsockname()[1]
        return chosen


def _announce(endpoint: str, port: int, guarded: bool, ready_fd: int, ended: threading.Event) -> None:
    """Writes the endpoint once this process answers a handshake there, unless serving is over before."""
    try:
        while not ended.is_set():
            with contextlib.suppress(BridgeError):
                probe(endpoint, timeout_s=1.0)
                if _listens(port) and not ended.is_set():
                    answer = {"endpoint": endpoint, "pid": os.getpid(), "guarded": guarded}
                    os.write(ready_fd, (json.dumps(answer) + "\n").encode())
                    os.close(ready_fd)
                    return
            time.sleep(0.01)
    except Exception as error:  # memory that is refused; whoever waits for the line shall not wait in vain
        print(f"rpc_server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _listens(port: int) -> bool:
    """Whether what listens at a port is this process. True where the system does not tell."""
    try:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        fds = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return True
    own = set()
    for fd in fds:
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(str(fd.readlink()))
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    return not sockets or not sockets.isdisjoint(own)


def _leave_with(pid: int) -> None:
    """Ends this process when process `pid` has ended. Not PR_SET_PDEATHSIG: that fires when the *thread* ends which
    started us."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            poller = select.poll()
            poller.register(os.pidfd_open(pid), select.POLLIN)
            poller.poll()
            os._exit(0)
    while os.getppid() == pid:
        time.sleep(_POLL_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
