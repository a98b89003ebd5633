"""Fuzz target `request`: bytes at the port of `oallama serve`, through our server to a stand-in for llama-server."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import selectors
from pathlib import Path
from random import Random
from typing import Any

import h11
from uvicorn.server import ServerState

from fuzz.mutation import NUMBERS, damaged, damaged_json, text
from oallama.core.errors import UsageError
from oallama.report import page
from oallama.serve.access import PUBLIC, Access
from oallama.serve.app import application
from oallama.serve.proxy import Proxy
from oallama.serve.server import Connection, _config
from oallama.serve.supervisor import Launch, Supervisor

KEY = "s3cret-key"
MOST_BODY_BYTES = 1 << 20
ANSWERED_S = 2.0  # that a request may take, or its end without its client
PART_S = 1.0  # after which a client sends its second half, or leaves
STAYED_S = 120.0  # longer than a server may wait for anything that a client does not send
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
OURS = {b"authorization", b"x-api-key", b"expect", b"te", b"trailer", b"upgrade", b"proxy-authorization"}
OF_CONNECTION = {b"host", b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"proxy-authenticate"}

Headers = list[tuple[bytes, bytes]]
Asked = tuple[bytes, bytes, Headers, bytes]  # method, target, headers, body

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get", "")
TARGETS = (
    "/", "/placement", "/placement.html", "/placement/tune", "/health", "/v1/health", "/v1/models",
    "/v1/chat/completions", "/metrics", "/placement?x=1", "/placement/../v1/models", "//placement",
    "/%2e%2e/etc/passwd", "/a%00b", "/v1/models#a", "/a%20b?q=%", "*", "http://other.example/v1/models",
    "localhost:80", "/é", "/" + "a" * 5000, "/a\\b", "/?",
)  # fmt: skip
HEADERS = (
    ("Host", "127.0.0.1:8080"), ("Host", "localhost"), ("Host", "[::1]:80"), ("Host", "[::1"),
    ("Host", "other.example"), ("Host", "http://x"), ("Origin", "http://localhost:3000"),
    ("Origin", "http://other.example"), ("Origin", "http://["), ("Origin", "null"),
    ("Authorization", f"Bearer {KEY}"), ("Authorization", f"bearer {KEY} "), ("X-Api-Key", KEY),
    ("Authorization", "Basic OnMzY3JldC1rZXk="), ("Authorization", "Basic é"), ("Authorization", "Bearer"),
    ("Content-Type", "application/json"), ("Accept", "text/event-stream"), ("Expect", "100-continue"),
    ("TE", "trailers"), ("Connection", "close"), ("Connection", "Upgrade, X-Secret"), ("Upgrade", "websocket"),
    ("Upgrade", "h2c"), ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip, chunked"),
    ("Content-Length", "0"), ("Cookie", "a=b"), ("Content-Length", "99999999999999999999"), ("Content-Length", "-1"),
    ("Content-Length", "5, 5"), ("X-é", "ü\tx"),
)  # fmt: skip
BODIES = (
    '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": 4}',
    '{"prompt": "Once", "n_predict": 4, "stop": ["a"], "logit_bias": [[1, 2.5]], "cache_prompt": true}',
    '{"input": ["a", "b"], "encoding_format": "float"}',
)


#
# inputs
#


def make(random: Random) -> bytes:
    """`key` or `open`, whether the server has a key; what the client does: nothing, `stays` or `leaves`, as in
    Stand.asked; and below it what it sends: a request, or two."""
    raw = b"".join(_request(random) for _ in range(random.choice((1, 1, 1, 2))))
    if random.random() < 0.15:
        raw = damaged(random, raw, within=400)
    kind = random.choice((b"key", b"open"))
    return kind + random.choice((b"", b" stays", b" leaves")) + b"\n" + raw


def _request(random: Random) -> bytes:
    method = random.choice(METHODS[:7]) if random.random() < 0.9 else random.choice((*METHODS, text(random, "POST")))
    target = random.choice(TARGETS[:8]) if random.random() < 0.7 else text(random, random.choice(TARGETS))
    headers = []
    if random.random() < 0.6:
        headers.append(("Authorization", f"Bearer {KEY}"))
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        name, value = random.choice(HEADERS)
        headers.append((name, text(random, value) if random.random() < 0.2 else value))
    if random.random() < 0.9 and all(name != "Host" for name, _ in headers):
        headers.append(("Host", "127.0.0.1"))
    body = b""
    if method not in ("GET", "HEAD", "OPTIONS") or random.random() < 0.05:
        body = damaged_json(random, random.choice(BODIES)) if random.random() < 0.7 else random.choice(BODIES).encode()
        if random.random() < 0.3:
            headers.append(("Transfer-Encoding", "chunked"))
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part) + b"0\r\n\r\n"
        else:
            length = random.choice(NUMBERS) if random.random() < 0.05 else len(body)
            headers.append(("Content-Length", str(length)))
    random.shuffle(headers)
    lines = [f"{method} {target} HTTP/1.{random.choice('1111102')}", *(f"{name}: {value}" for name, value in headers)]
    return "".join(f"{line}\r\n" for line in lines).encode("utf-8", "surrogatepass") + b"\r\n" + body


#
# what must come of them
#


def check(raw: bytes, folder: Path) -> None:
    """Answered, or refused in a sentence. What reaches llama-server is what the client asked, with the key alone."""
    first, _, sent = raw.partition(b"\n")
    kind, _, does = first.partition(b" ")
    stand = _stand(str(folder))
    try:
        written, calls = stand.loop.run_until_complete(stand.asked(sent, kind == b"key", does))
    except BaseException:
        stand.end()  # it may be in the midst of something
        _stand.cache_clear()
        raise
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", written)]
    assert not any(status >= 500 for status in statuses), written[:500]
    for method, target, headers, body in stand.received:
        assert not OURS & {name for name, _ in headers}, headers
        asked = (method, target, _passed_on(headers), body)
        assert asked == (b"GET", b"/metrics", [], b"") or asked in calls, f"{asked} of {calls}"
        public = method == b"OPTIONS" or target.partition(b"?")[0].decode("latin-1") in (*PUBLIC, "/metrics")
        assert public or kind != b"key" or KEY.encode() in sent, f"without a key: {asked}"
    if not statuses or statuses[0] >= 400:
        raise UsageError(_message(written))


def _passed_on(headers: Headers) -> Headers:
    """Those that llama-server is to get as the client sent them."""
    return [(name, value) for name, value in headers if name not in OURS | OF_CONNECTION]


def _message(written: bytes) -> str:
    head, _, body = written.partition(b"\r\n\r\n")
    if not body.startswith(b"{"):
        return head.partition(b"\r\n")[0].decode("latin-1") or "no answer"
    return str(json.JSONDecoder().raw_decode(body.decode())[0]["error"]["message"])


class _Clock(selectors.DefaultSelector):
    """The loop's time. Who serves, who asks and who stands in for llama-server are in one thread: where nothing is
    ready, nothing comes but the next timer, and its time is now. So no input waits, and a busy machine changes
    nothing."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and for nothing"
            self.seconds += max(timeout, 0.0)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.seconds


class _Transport(asyncio.Transport):
    """A connection that keeps what is written to it. lost: done once its protocol has been told of its end."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self._protocol = protocol

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += bytes(data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        self._protocol.connection_lost(None)
        self.lost.set_result(None)

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Stand:
    """Our server, with a key and without, over a socket where what arrives is kept and answered with `{}`."""

    def __init__(self, folder: str) -> None:
        from placement_records import on_cpu, served

        self.loop = _Loop()
        self.loop.set_exception_handler(self._on_loop_error)
        self.received: list[Asked] = []
        self._calls: list[Asked] = []
        self._errors: list[BaseException] = []
        self._is_slow = False
        path = str(Path(folder) / "s.sock")
        Path(path).unlink(missing_ok=True)
        self._server = self.loop.run_until_complete(asyncio.start_unix_server(self._answer, path))
        proxy = Proxy(path, lambda: "it is being started again", MOST_BODY_BYTES)
        supervisor = Supervisor(Launch(("true",), {}, False), None, self._yes)
        supervisor.ready.set()
        app = application(supervisor, proxy, lambda: on_cpu(served()))
        self._accesses = {True: Access(app, KEY), False: Access(app, None)}  # by whether there is a key
        self._configs = {key: _config(self._watched(access)) for key, access in self._accesses.items()}
        for config in self._configs.values():
            config.load()
        logging.getLogger("uvicorn.error").disabled = True  # errors are looked at here
        page.environment = functools.cache(page.environment)  # its templates are compiled once, not for each page

    def end(self) -> None:
        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._server.close()
        self.loop.run_until_complete(end())
        self.loop.close()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of an error that nobody waits for."""
        self._errors.append(context.get("exception") or RuntimeError(context["message"]))

    async def _yes(self) -> bool:
        return True

    async def asked(self, sent: bytes, has_key: bool, does: bytes) -> tuple[bytes, list[Asked]]:
        """What is written to a client that sends this, and the requests that were in it. The client goes when its first
        request is answered, or in the midst of its body; or it `stays`, sends in two halves, and is let go; or it
        `leaves` while llama-server has not answered, or not to the end."""
        self.received.clear()
        self._calls.clear()
        self._errors.clear()
        self._is_slow = does == b"leaves"
        state = ServerState()
        connection = Connection(self._configs[has_key], state, {})
        self._transport = transport = _Transport(connection)
        connection.connection_made(transport)
        if does == b"stays":
            for part in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
                if part and not transport.closed:
                    connection.data_received(part)
                await asyncio.sleep(PART_S)
            await asyncio.wait({transport.lost}, timeout=STAYED_S)
            assert transport.lost.done(), "a client that sends nothing more is kept"
        else:
            if sent:
                connection.data_received(sent)
            if self._is_slow:
                await asyncio.sleep(PART_S)
            elif connection.conn.their_state is not h11.SEND_BODY and state.tasks:
                _, left = await asyncio.wait(state.tasks, timeout=ANSWERED_S)
                assert not left, "a request is not answered"
            transport.close()
            await transport.lost
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(others, timeout=ANSWERED_S)
            assert not left, f"something goes on without its client: {left}"
        assert not self._accesses[has_key].n_requests, "a place is kept for a client that has gone"
        if self._errors:
            raise self._errors[0]
        return transport.written, list(self._calls)

    def _watched(self, app: Any) -> Any:
        async def watched(scope: Any, receive: Any, send: Any) -> None:
            parts = [b""]

            async def received() -> Any:
                message = await receive()
                parts[0] += message.get("body", b"")
                return message

            query = scope["query_string"]
            target = scope["raw_path"] + (b"?" + query if query else b"")
            try:
                await app(scope, received, send)
            except BaseException as error:  # TookTooLong too
                # what is no HTTP behind the head of a request is refused by uvicorn, after which nobody can answer
                refused = isinstance(error, h11.LocalProtocolError) and self._transport.closed
                if not refused and not isinstance(error, asyncio.CancelledError):
                    self._errors.append(error)
                raise
            finally:
                self._calls.append((scope["method"].encode(), target, _passed_on(scope["headers"]), parts[0]))

        return watched

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = h11.Connection(h11.SERVER)
        head, body = None, b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(1 << 16)
                if not data:  # given up, which llama-server too would not answer
                    writer.close()
                    return
                parser.receive_data(data)
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        if head is not None:
            trailing = parser.trailing_data[0]
            self.received.append((head.method, head.target + trailing, list(head.headers), body))
            if self._is_slow:
                writer.write(ANSWER[: len(ANSWER) - 1 if len(body) % 2 else 0])
                await reader.read()  # until it is given up
            else:
                writer.write(ANSWER.removesuffix(b"{}") if head.method == b"HEAD" else ANSWER)
        writer.close()


@functools.cache
def _stand(folder: str) -> _Stand:
    return _Stand(folder)
