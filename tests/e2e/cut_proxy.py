"""A TCP proxy in front of a ggml RPC server that fails at the n-th command: it goes, or it never answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

HEADER = struct.Struct("<BQ")  # command, bytes that follow


class CutProxy:
    """endpoint: host:port. Commands are counted over all connections, from 1; from that at which it fails on, nobody is
    served. silent: it leaves its connections open. n_commands: seen so far."""

    def __init__(self, server: str, fails_at: int, silent: bool = False) -> None:
        host, _, port = server.partition(":")
        self._server, self._fails_at, self._silent = (host, int(port)), fails_at, silent
        self.n_commands = 0
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> CutProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while self.n_commands < self._fails_at:
                client, _ = self._listener.accept()
                with client, socket.create_connection(self._server) as server:
                    back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
                    back.start()
                    with contextlib.suppress(OSError):
                        self._commands(client, server)
                    for end in (client, server):
                        with contextlib.suppress(OSError):
                            end.shutdown(socket.SHUT_RDWR)
                    back.join()
        self._listener.close()

    def _commands(self, client: socket.socket, server: socket.socket) -> None:
        """Until the client has enough, or the command at which this fails."""
        while True:
            header = _receive(client, HEADER.size)
            self.n_commands += 1
            if self.n_commands >= self._fails_at:
                if self._silent:
                    self._over.wait()
                return
            server.sendall(header + _receive(client, HEADER.unpack(header)[1]))


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        chunk = connection.recv(n_bytes - len(data))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return data


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            to.sendall(chunk)
