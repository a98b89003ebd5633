"""One request to llama-server at its Unix socket, and the answer as its bytes come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import h11
import httptools

MOST_WAITING_BYTES = 1 << 18  # of an answer whose client is slow; llama-server has to wait then

Headers = list[tuple[bytes, bytes]]


class BrokenOff(Exception):
    """llama-server is not there, has ended in the middle of an answer, or answers what is no HTTP."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request, without the headers that the connection and the body's length need."""

    method: str
    target: bytes
    headers: Iterable[tuple[bytes, bytes]] = ()
    body: bytes = b""


class Answer(asyncio.Protocol):
    """The answer to a request, with a connection of its own: one that llama-server closes meanwhile fails."""

    def __init__(self, asked: UpstreamRequest) -> None:
        """Raises h11.LocalProtocolError for what HTTP cannot say."""
        self.status = 0
        self.headers: Headers = []
        self._has_no_body = asked.method == "HEAD"
        self._request = _written(asked)
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._has_head = False
        self._is_whole = False
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
        while not self._has_head:
            if self._has_ended:
                raise BrokenOff
            await self._something()

    async def part(self) -> bytes:
        """What has come of the body, as soon as there is something; b"" at its end. Raises BrokenOff."""
        while not self._parts:
            if self._is_whole:
                return b""
            if self._has_ended:
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
        self._parser = None  # it holds this answer
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
        if self._parser is None or self._is_whole:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            return
        if self._n_waiting > MOST_WAITING_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self._parts or self._is_whole:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and not self._is_bounded:
            self._is_whole = True
        self._end()

    @property
    def _is_bounded(self) -> bool:
        """Whether the head says where the body ends; else it does so with the connection."""
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    #
    # as httptools calls it
    #

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:  # the answer follows
            self.headers.clear()
            return
        self.status, self._has_head, self._is_whole = status, True, self._has_no_body
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._n_waiting += len(body)

    def on_message_complete(self) -> None:
        self._is_whole = self._has_head


_WITH_BODY = ("POST", "PUT", "PATCH")


def _written(asked: UpstreamRequest) -> list[bytes]:
    connection = h11.Connection(h11.CLIENT)
    length = [(b"Content-Length", b"%d" % len(asked.body))] if asked.body or asked.method in _WITH_BODY else []
    headers = [(b"Host", b"llama-server"), *asked.headers, *length]
    head = connection.send(h11.Request(method=asked.method, target=asked.target, headers=headers))
    body = connection.send(h11.Data(data=asked.body)) if asked.body else b""
    connection.send(h11.EndOfMessage())
    return [head or b"", body or b""]
