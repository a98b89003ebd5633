"""A TCP proxy in front of an RPC server that has a network's latency and rate, in each direction."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def slow_proxy(server: str, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Its host:port. What comes in leaves latency_s later, and no faster than bytes_per_s."""
    host, _, port = server.partition(":")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                upstream = socket.create_connection((host, int(port)))
                for end in (client, upstream):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for source, to in ((client, upstream), (upstream, client)):
                    threading.Thread(target=carry, args=(source, to), daemon=True).start()

    def carry(source: socket.socket, to: socket.socket) -> None:
        """From one end to the other, until the first closes."""
        sent: queue.Queue[tuple[float, bytes]] = queue.Queue(maxsize=64)
        threading.Thread(target=deliver, args=(sent, to), daemon=True).start()
        free_at = 0.0  # when the wire has taken all before
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                free_at = max(free_at, time.monotonic()) + len(chunk) / bytes_per_s
                sent.put((free_at + latency_s, chunk))
        sent.put((0.0, b""))

    def deliver(sent: queue.Queue[tuple[float, bytes]], to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, chunk = sent.get()
                if not chunk:
                    break
                time.sleep(max(0.0, due - time.monotonic()))
                to.sendall(chunk)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
