"""One request to llama-server at its Unix socket, and the answer as its bytes come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import h11

from oallama.serve.framing import Body, Chunked, Counted, FramingError, Unbounded

MOST_WAITING_BYTES = 1 << 18  # of an answer whose client is slow; llama-server has to wait then

Headers = list[tuple[bytes, bytes]]


class BrokenOff(Exception):
    """llama-server is not there, has ended in the middle of an answer, or answers what is no HTTP."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, without the headers that the connection and the body's length need."""

    method: str
    target: bytes
    headers: Iterable[tuple[bytes, bytes]] = ()
    body: bytes = b""


class Answer(asyncio.Protocol):
    """The answer to a request, with a connection of its own: one that llama-server closes meanwhile fails."""

    def __init__(self, asked: Asked) -> None:
        """Raises h11.LocalProtocolError for what HTTP cannot say."""
        self.status = 0
        self.headers: Headers = []
        self._asked = asked
        self._parser = h11.Connection(h11.CLIENT)
        self._request = _written(self._parser, asked)
        self._body: Body | None = None  # once the head has come
        self._parts: list[bytes] = []
        self._n_waiting = 0
        self._is_paused = False
        self._has_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    async def begin(self, path: str) -> None:
        """Ask, and wait for the head of the answer. Raises BrokenOff."""
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, path)
        except OSError:
            raise BrokenOff from None
        while self._body is None:
            if self._has_ended:
                raise BrokenOff
            await self._something()

    async def part(self) -> bytes:
        """What has come of the body, as soon as there is something; b"" at its end. Raises BrokenOff."""
        while not self._parts:
            assert self._body is not None
            if self._body.is_whole:
                return b""
            if self._has_ended:
                if isinstance(self._body, Unbounded):
                    return b""
                raise BrokenOff
            await self._something()
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._n_waiting = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return part

    async def whole(self) -> bytes:
        """The body. Raises BrokenOff."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """End the connection; who waits for something of the answer is told that it has broken off."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    async def _something(self) -> None:
        """Until something has come, or the end."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self) -> None:
        self._has_ended = True
        self._wake()

    #
    # as asyncio calls it
    #

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._has_ended:
            transport.abort()
            return
        transport.writelines(self._request)
        self._request = []

    def data_received(self, data: bytes) -> None:
        try:
            if self._body is None:
                self._parser.receive_data(data)
                if not self._head_has_come():
                    return
                data, _ = self._parser.trailing_data
            assert self._body is not None
            part = self._body.payload(data)
        except (h11.RemoteProtocolError, FramingError):
            self.close()
            return
        if part:
            self._parts.append(part)
            self._n_waiting += len(part)
            if self._n_waiting > MOST_WAITING_BYTES and not self._is_paused and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()
        if part or self._body.is_whole:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _head_has_come(self) -> bool:
        """Raises h11.RemoteProtocolError."""
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = list(event.headers)
                self._body = _body_of(self._asked.method, self.status, dict(self.headers))
                self._wake()
                return True
            if not isinstance(event, h11.InformationalResponse):
                return False


_WITH_BODY = ("POST", "PUT", "PATCH")


def _written(parser: h11.Connection, asked: Asked) -> list[bytes]:
    length = [(b"Content-Length", b"%d" % len(asked.body))] if asked.body or asked.method in _WITH_BODY else []
    headers = [(b"Host", b"llama-server"), *asked.headers, *length]
    head = parser.send(h11.Request(method=asked.method, target=asked.target, headers=headers))
    body = parser.send(h11.Data(data=asked.body)) if asked.body else b""
    parser.send(h11.EndOfMessage())
    return [head or b"", body or b""]


def _body_of(method: str, status: int, headers: dict[bytes, bytes]) -> Body:
    if method == "HEAD" or status in (204, 304):
        return Counted(0)
    if b"transfer-encoding" in headers:  # h11 knows none but chunked
        return Chunked()
    length = headers.get(b"content-length")
    return Unbounded() if length is None else Counted(int(length))
