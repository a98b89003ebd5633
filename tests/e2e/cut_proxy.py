"""A TCP proxy in front of a ggml RPC server that fails at the n-th command: it goes, or it never answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

HEADER = struct.Struct("<BQ")  # command, bytes that follow


@contextlib.contextmanager
def cut_proxy(server: str, fails_at: int, silent: bool = False) -> Iterator[str]:
    """Its host:port. Commands are counted over all connections, from 1; from that at which it fails on, nobody is
    served. silent: it leaves its connections open."""
    host, _, port = server.partition(":")
    commands, over = iter(range(1, fails_at)), threading.Event()

    def pass_on_commands(client: socket.socket, to: socket.socket) -> bool:
        """Until the client has enough, or False at the command at which this fails."""
        while len(header := client.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
            if next(commands, None) is None:
                if silent:
                    over.wait()
                return False
            to.sendall(header + client.recv(HEADER.unpack(header)[1], socket.MSG_WAITALL))
        return True

    def serve() -> None:
        goes_on = True
        with contextlib.suppress(OSError):
            while goes_on:
                client, _ = listener.accept()
                with client, socket.create_connection((host, int(port))) as upstream:
                    back = threading.Thread(target=_pass_on, args=(upstream, client), daemon=True)
                    back.start()
                    with contextlib.suppress(OSError):
                        goes_on = pass_on_commands(client, upstream)
                    for end in (client, upstream):
                        with contextlib.suppress(OSError):
                            end.shutdown(socket.SHUT_RDWR)
                    back.join()
        listener.close()

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        thread.join()


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            to.sendall(chunk)
