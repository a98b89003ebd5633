"""Requests passed on to llama-server as they are, and its answers back as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from oallama.serve.errors import error_event, error_response

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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # one that it closes meanwhile fails
        self._transport = httpx.AsyncHTTPTransport(uds=socket_path, limits=limits)
        self._why_not = why_not
        self._most_body_bytes = most_body_bytes

    async def close(self) -> None:
        await self._transport.aclose()

    async def get(self, path: str, timeout_s: float) -> httpx.Response | None:
        """A request of our own; None where there is no answer, or nothing more of it for so long."""
        request = httpx.Request("GET", f"http://llama-server{path}", extensions={"timeout": _timeouts(timeout_s)})
        try:
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError:
            return None
        return response

    async def __call__(self, request: Request) -> Response:
        """Raises nothing that a client can cause."""
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        headers = [
            (name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _OF_A_HOP | _OURS
        ]
        extensions = {"timeout": _timeouts(None), "target": _raw_path(request)}  # a URL would be put in order
        asked = httpx.Request(
            request.method, "http://llama-server", headers=headers, content=body, extensions=extensions
        )
        asked.headers["host"] = "llama-server"
        answer = await self._answer(asked, request)
        if isinstance(answer, Response):
            return answer
        kept = [(name, value) for name, value in answer.headers.raw if name.lower().decode("latin-1") not in _OF_A_HOP]
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        response = _Answer(self._passed_on(answer, is_stream), answer.status_code)
        response.raw_headers = [(name.lower(), value) for name, value in kept]
        return response

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

    async def _answer(self, asked: httpx.Request, request: Request) -> httpx.Response | Response:
        """The answer's beginning. A client that goes meanwhile ends the request there too."""
        sending = asyncio.ensure_future(self._transport.handle_async_request(asked))
        gone = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                return Response(status_code=CLIENT_GONE)
            return sending.result()
        except httpx.HTTPError:
            return error_response(503, self._why_not(), {"Retry-After": "2"})
        finally:
            for task in (sending, gone):
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                        await task

    async def _passed_on(self, answer: httpx.Response, is_stream: bool) -> AsyncIterator[bytes]:
        """What comes, untouched. Where it breaks off, a stream of events ends with one that says so; another answer is
        broken off too, so that nobody takes a part for the whole."""
        at_end_of_event = True
        try:
            async for part in answer.aiter_raw():
                at_end_of_event = part.endswith(b"\n\n")
                yield part
        except httpx.HTTPError:
            if not is_stream or not at_end_of_event:
                raise
            yield error_event(self._why_not())
        finally:
            await answer.aclose()


class _Answer(StreamingResponse):
    """Ends with its client. Starlette's own leaves tasks and exceptions that hold each other, and by them the request,
    until a full garbage collection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.wait({sending, gone})
        if not sending.cancelled():
            sending.result()


async def _disconnected(receive: Receive) -> None:
    """Until the client goes."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _timeouts(seconds: float | None) -> dict[str, float | None]:
    """None: an answer may take as long as it takes."""
    return {"connect": 5.0, "read": seconds, "write": seconds, "pool": None}


def _raw_path(request: Request) -> bytes:
    """Path and query as the client wrote them."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope["query_string"]
    return raw + (b"?" + query if query else b"")
