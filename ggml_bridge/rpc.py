"""ggml's RPC back end: ask whether a server answers.

ggml's client calls abort() whenever a server cannot be reached, does not answer its handshake, or breaks the
connection later; and it waits without end for a server that is busy, since a server has one client at a time. So
`probe` makes the handshake first, with a time limit. A server lost later takes the process down (SIGABRT, last words
"Remote RPC server crashed or returned malformed response").
"""

from __future__ import annotations

import socket
import struct

from ggml_bridge.errors import BridgeError

PROTOCOL_MAJOR = 8
"""Major version of ggml 0.26.0's RPC protocol; servers of another one are refused by it with an abort."""

_HELLO = 14  # RPC_CMD_HELLO
_CAPS_BYTES = 24  # transport capabilities of either side; zeros: plain TCP


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of `host:port`; raises ValueError. ggml takes names and IPv4 addresses, not IPv6."""
    host, _, port = endpoint.rpartition(":")
    if not host or ":" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not an RPC endpoint; write host:port, e.g. 192.168.1.2:50052")
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
        raise BridgeError(f"cannot reach an RPC server at {endpoint}: {error.strerror or error}") from None
    if not answer or answer[0] != PROTOCOL_MAJOR:
        version = f"speaks protocol {answer[0]}.{answer[1]}" if answer else "is not a compatible ggml RPC server"
        raise BridgeError(f"the server at {endpoint} {version}, but {PROTOCOL_MAJOR}.x is needed (ggml 0.26.0)")


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        chunk = connection.recv(n_bytes - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return data
