"""Requests passed on to llama-server as they are, and its answers back as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oallama.serve.errors import error_event, error_response
from oallama.serve.upstream import Answer, BrokenOff, UpstreamRequest

MOST_BODY_BYTES = 64 * 2**20  # pictures come as text in the body
BODY_S = 60.0  # that a client may be silent in the middle of its body
CLIENT_GONE = 499  # nobody reads it

_OF_A_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    "upgrade",
}
_OURS = {"host", "content-length", "authorization", "x-api-key", "expect"}


class Proxy:
    """To a server at a Unix socket. why_not: the sentence for clients while it does not answer."""

    def __init__(self, socket_path: str, why_not: Callable[[], str], most_body_bytes: int = MOST_BODY_BYTES) -> None:
        self._path = socket_path
        self._why_not = why_not
        self._most_body_bytes = most_body_bytes
        self._heard_at = float("-inf")

    def heard(self, seconds: float) -> bool:
        """Whether a part of an answer that was passed on has come within so long."""
        return time.monotonic() - self._heard_at < seconds

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes] | None:
        """A request of our own: its status and body; None where they do not come within so long."""
        answer = Answer(UpstreamRequest("GET", path.encode()))
        late = asyncio.get_running_loop().call_later(timeout_s, answer.close)
        try:
            await answer.begin(self._path)
            return answer.status, await answer.whole()
        except BrokenOff:
            return None
        finally:
            late.cancel()
            answer.close()

    async def __call__(self, request: Request) -> Response:
        """Raises nothing that a client can cause. An answer that is passed on has to be called, or closed."""
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        headers = [
            (name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _OF_A_HOP | _OURS
        ]
        try:
            answer = Answer(UpstreamRequest(request.method, _raw_path(request), headers, body))
        except h11.LocalProtocolError as error:
            return error_response(400, f"the request cannot be passed on: {error}")
        gone = asyncio.ensure_future(_disconnected(request.receive))
        gone.add_done_callback(lambda _: answer.close())
        try:
            await answer.begin(self._path)
        except BrokenOff:
            if gone.done():
                return Response(status_code=CLIENT_GONE)
            gone.cancel()
            return error_response(503, self._why_not(), {"Retry-After": "2"})
        except BaseException:
            gone.cancel()
            raise
        return PassedOn(answer, gone, self._why_not, self._hear)

    def _hear(self) -> None:
        self._heard_at = time.monotonic()

    async def _body(self, request: Request) -> bytes | Response:
        """The whole body, or the refusal of it."""
        too_long = f"the body is longer than {self._most_body_bytes // 2**20} MiB"
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:19]) > self._most_body_bytes:
            return error_response(413, too_long, {"Connection": "close"})
        parts: list[bytes] = []
        n_bytes = 0
        while True:
            try:  # no request.stream(): the exception that ends it and wait_for's task hold each other, and the body
                message = await asyncio.wait_for(request.receive(), BODY_S)
            except asyncio.TimeoutError:
                return error_response(408, f"nothing came of the body for {BODY_S:.0f} s", {"Connection": "close"})
            if message["type"] == "http.disconnect":
                return Response(status_code=CLIENT_GONE)
            part: bytes = message.get("body", b"")
            n_bytes += len(part)
            if n_bytes > self._most_body_bytes:
                return error_response(413, too_long, {"Connection": "close"})
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


class PassedOn(Response):
    """The parts of an answer as they come, untouched; it ends with its client. Where it breaks off, a stream of events
    ends with one that says so; another answer is broken off too, so that nobody takes a part for the whole.

    Starlette's own leaves tasks and exceptions that hold each other, and by them the request, until a full garbage
    collection. gone: done when the client has gone; hear: called with every part.
    """

    def __init__(
        self, answer: Answer, gone: asyncio.Future[None], why_not: Callable[[], str], hear: Callable[[], None]
    ) -> None:
        self.status_code = answer.status
        self.raw_headers = [(name, value) for name, value in answer.headers if name.decode("latin-1") not in _OF_A_HOP]
        self.background = None
        self._answer, self._gone, self._why_not, self._hear = answer, gone, why_not, hear

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at_end_of_event = True
            try:
                while part := await self._answer.part():
                    self._hear()
                    at_end_of_event = part.endswith(b"\n\n")
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except BrokenOff:
                if self._gone.done():
                    return
                if not self._is_stream or not at_end_of_event:
                    raise
                await send({"type": "http.response.body", "body": error_event(self._why_not()), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.close()

    @property
    def _is_stream(self) -> bool:
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.raw_headers
        )

    def close(self) -> None:
        """End the request there too."""
        self._gone.cancel()
        self._answer.close()


async def _disconnected(receive: Receive) -> None:
    """Until the client goes."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _raw_path(request: Request) -> bytes:
    """Path and query as the client wrote them."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope["query_string"]
    return raw + (b"?" + query if query else b"")
