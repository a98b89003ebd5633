"""HTTP to a llama-server: requests and answers in JSON, and events as they come."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oallama.core.errors import UsageError
from oallama.run.address import Address

MEANWHILE_S = 0.05


class RequestRefused(Exception):
    """llama-server refused a request. kind: llama-server's error type; status: HTTP status."""

    def __init__(self, status: int, document: Any) -> None:
        error = document.get("error") if isinstance(document, dict) else None
        self.status = status
        self.details: dict[str, Any] = error if isinstance(error, dict) else {}
        self.kind = str(self.details.get("type", ""))
        super().__init__(str(self.details.get("message", error or f"HTTP status {status}")))


class ServerGone(Exception):
    """llama-server no longer answers."""


class Client:
    """A client of llama-server's HTTP API. Each request has its own connection, so threads may share a client. If a
    request is aborted, llama-server sees the closed connection and stops computing."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def ask(self, path: str, body: Mapping[str, Any] | None = None, meanwhile: Callable[[], None] | None = None) -> Any:
        """The document at a path, or the answer to a document. meanwhile: called until the answer begins, and may
        raise. Raises RequestRefused, ServerGone."""
        with self._asked(path, body, meanwhile) as answer:
            return json.loads(answer.read())

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the documents of a streamed answer. Raises RequestRefused, ServerGone."""
        with self._asked(path, body) as answer:
            while line := answer.readline():
                kind, _, data = line.strip().partition(b": ")
                if data == b"[DONE]" or kind not in (b"data", b"error"):  # an end, a blank line, or a sign of life
                    continue
                document = json.loads(data)
                if kind == b"error" or "error" in document:
                    raise RequestRefused(200, document if "error" in document else {"error": document})
                yield document

    @contextmanager
    def _asked(
        self, path: str, body: Mapping[str, Any] | None, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer to read inside the block. Raises RequestRefused, ServerGone."""
        headers = {"Content-Type": "application/json"}
        if self._address.api_key is not None:
            headers["Authorization"] = f"Bearer {self._address.api_key}"
        data = None if body is None else encoded(body)
        connection = http.client.HTTPConnection(self._address.local_host, self._address.port)
        try:
            connection.request("GET" if data is None else "POST", path, data, headers)
            if meanwhile is not None:
                _wait(connection.sock, meanwhile)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read().decode(errors="replace")
                raise RequestRefused(
                    answer.status, json.loads(text) if text.startswith("{") else {"error": text.strip()}
                )
            yield answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerGone(str(error)) from None
        finally:
            connection.close()


def _wait(sock: socket.socket, meanwhile: Callable[[], None]) -> None:
    """Wait until data can be read."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while not selector.select(MEANWHILE_S):
            meanwhile()


def encoded(body: Mapping[str, Any]) -> bytes:
    """A document as JSON. Raises UsageError for values without a JSON form, and for invalid Unicode, e.g. of a file
    name that is not UTF-8."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("the text is not UTF-8; convert it") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot send the request as JSON: {error}") from None
