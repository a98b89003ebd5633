"""RPC servers behind one port: each client has one of its own, which serves another when that client has gone.

`python rpc_pool.py THREADS [CPUS]` prints host:port, and serves until its stdin ends. It is no child of who starts it:
tests look for children that stay.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading

CHUNK = 1 << 20


def main(threads: int, cpus: list[int]) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    if os.fork():
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        os._exit(0)
    os.setsid()
    from rpc_server import RpcServer

    idle: list[RpcServer] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            client, _ = listener.accept()
            while idle and idle[-1].died():
                idle.pop()
            server = idle.pop() if idle else RpcServer(threads, cpus)  # which ends with this thread
            threading.Thread(target=connect, args=(client, server, idle), daemon=True).start()
    os._exit(0)


def connect(client: socket.socket, server: object, idle: list[object]) -> None:
    """Pass on what a client and its server say until either has gone."""
    host, _, port = server.endpoint.partition(":")  # type: ignore[attr-defined]
    with client, socket.create_connection((host, int(port))) as upstream:
        for end in (client, upstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=pass_on, args=(upstream, client), daemon=True)
        back.start()
        pass_on(client, upstream)
        back.join()
    idle.append(server)


def pass_on(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK):
            to.sendall(chunk)
    for end in (source, to):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(cpu) for cpu in sys.argv[2:]])
