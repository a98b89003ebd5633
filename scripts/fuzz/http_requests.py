"""What comes in at the port of `oallama serve`, as bytes, through our server to a stand-in for llama-server."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
from pathlib import Path
from random import Random
from typing import Any

import h11
from uvicorn.server import ServerState

from fuzz.mutation import NUMBERS, damaged, damaged_json, text
from oallama.core.errors import UsageError
from oallama.serve.access import PUBLIC, Access
from oallama.serve.app import application
from oallama.serve.proxy import Proxy
from oallama.serve.server import Connection, _config
from oallama.serve.supervisor import Launch, Supervisor

KEY = "s3cret-key"
MOST_BODY_BYTES = 1 << 20
ANSWERED_S = 5.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
OURS = {b"authorization", b"x-api-key", b"expect", b"te", b"trailer", b"upgrade", b"proxy-authorization"}

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
    """`key` or `open`, whether the server has a key, and below it what a client sends: a request, or two."""
    raw = b"".join(_request(random) for _ in range(random.choice((1, 1, 1, 2))))
    if random.random() < 0.15:
        raw = damaged(random, raw, within=400)
    return random.choice((b"key\n", b"open\n")) + raw


def _request(random: Random) -> bytes:
    method = random.choice(METHODS[:7]) if random.random() < 0.9 else random.choice((*METHODS, text(random, "POST")))
    target = random.choice(TARGETS[:8]) if random.random() < 0.7 else text(random, random.choice(TARGETS))
    headers = [("Host", "127.0.0.1")] if random.random() < 0.9 else []
    if random.random() < 0.6:
        headers.append(("Authorization", f"Bearer {KEY}"))
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        name, value = random.choice(HEADERS)
        headers.append((name, text(random, value) if random.random() < 0.2 else value))
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
    kind, _, sent = raw.partition(b"\n")
    stand = _stand(str(folder))
    try:
        written, calls = stand.loop.run_until_complete(stand.asked(sent, has_key=kind == b"key"))
    except BaseException:
        stand.end()  # it may be in the midst of something
        _stand.cache_clear()
        raise
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", written)]
    assert not any(status >= 500 for status in statuses), written[:500]
    for method, target, headers, body in stand.received:
        asked = (method, target, body)
        assert asked == (b"GET", b"/metrics", b"") or asked in calls, f"{asked} of {calls}"
        assert not OURS & {name for name, _ in headers}, headers
        public = method == b"OPTIONS" or target.partition(b"?")[0].decode("latin-1") in (*PUBLIC, "/metrics")
        assert public or kind != b"key" or KEY.encode() in sent, f"without a key: {asked}"
    if not statuses or statuses[0] >= 400:
        raise UsageError(_message(written))


def _message(written: bytes) -> str:
    head, _, body = written.partition(b"\r\n\r\n")
    if not body.startswith(b"{"):
        return head.partition(b"\r\n")[0].decode("latin-1") or "no answer"
    return str(json.JSONDecoder().raw_decode(body.decode())[0]["error"]["message"])


class _Transport(asyncio.Transport):
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

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

        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: None)  # of connections that were given up
        self.received: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self._calls: list[tuple[bytes, bytes, bytes]] = []
        self._errors: list[Exception] = []
        path = str(Path(folder) / "s.sock")
        Path(path).unlink(missing_ok=True)
        self._server = self.loop.run_until_complete(asyncio.start_unix_server(self._answer, path))
        proxy = Proxy(path, lambda: "it is being started again", MOST_BODY_BYTES)
        supervisor = Supervisor(Launch(("true",), {}, False), None, self._yes)
        supervisor.ready.set()
        app = application(supervisor, proxy, lambda: on_cpu(served()))
        self._configs = {key: _config(self._watched(Access(app, key))) for key in (KEY, None)}
        for config in self._configs.values():
            config.load()
        logging.getLogger("uvicorn.error").disabled = True  # errors are looked at here

    def end(self) -> None:
        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._server.close()
        self.loop.run_until_complete(end())
        self.loop.close()

    async def _yes(self) -> bool:
        return True

    async def asked(self, sent: bytes, has_key: bool) -> tuple[bytes, list[tuple[bytes, bytes, bytes]]]:
        """What is written to a client that sends this and then goes, and the requests that were in it."""
        self.received.clear()
        self._calls.clear()
        self._errors.clear()
        state, transport = ServerState(), _Transport()
        connection = Connection(self._configs[KEY if has_key else None], state, {})
        connection.connection_made(transport)
        if sent:
            connection.data_received(sent)
        if connection.conn.their_state is not h11.SEND_BODY and state.tasks:
            await asyncio.wait(state.tasks, timeout=ANSWERED_S)
        connection.connection_lost(None)
        if state.tasks:
            _, left = await asyncio.wait(state.tasks, timeout=ANSWERED_S)
            assert not left, "a request goes on without its client"
        # what is no HTTP behind the head of a request is refused by uvicorn, after which nobody can answer
        if self._errors and not (transport.closed and isinstance(self._errors[0], h11.LocalProtocolError)):
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
            except Exception as error:
                self._errors.append(error)
                raise
            finally:
                self._calls.append((scope["method"].encode(), target, parts[0]))

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
            writer.write(ANSWER.removesuffix(b"{}") if head.method == b"HEAD" else ANSWER)
        writer.close()


@functools.cache
def _stand(folder: str) -> _Stand:
    return _Stand(folder)
