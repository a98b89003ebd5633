"""Access control of the server: API key, origins of websites, limit of requests. An ASGI application around another."""

from __future__ import annotations

import base64
import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from oallama.serve.errors import error_response

PUBLIC = ("/health", "/v1/health")
"""Without a key: whether the server is up says nothing of anybody."""

PAGES = ("/placement", "/placement.html")
"""What a browser may open with the key as the password that it asks for; to look at, so with GET alone."""

MOST_REQUESTS = 128  # answered or waiting at once


@dataclass
class Access:
    """app: behind it. key: None: who reaches the port may ask, as long as no website made the browser ask."""

    app: ASGIApp
    key: str | None
    most_requests: int = MOST_REQUESTS
    n_requests: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        open_to_all = scope["path"] in PUBLIC or scope["method"] == "OPTIONS"  # browsers send no key with that one
        refused = self._refused(scope["method"], scope["path"], headers, open_to_all)
        if refused is not None:
            status, message, more = refused
            await error_response(status, message, more)(scope, receive, send)
            return
        if open_to_all and not has_body(headers):
            await self.app(scope, receive, send)  # strangers' take no place that others need
            return
        if self.n_requests >= self.most_requests:
            busy = f"{self.most_requests} requests are being answered already; try again in a moment"
            await error_response(503, busy, {"Retry-After": "1"})(scope, receive, send)
            return
        self.n_requests += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.n_requests -= 1

    def _refused(
        self, method: str, path: str, headers: Headers, open_to_all: bool
    ) -> tuple[int, str, dict[str, str]] | None:
        """(status, message, headers) of the refusal; None where the request may pass."""
        if self.key is None:
            if not is_local(host_name(headers.get("host", ""))):
                return 403, "this server is for this machine: ask it as localhost, or start it with --api-key", {}
            origin = headers.get("origin")
            if origin is not None and not is_local(host_name(origin.partition("://")[2])):
                return 403, "a website of another host may not ask this server; start it with --api-key", {}
            return None
        if open_to_all and not has_body(headers):
            return None
        sent = headers.get("authorization", "")
        given = [text.encode("latin-1") for text in (bearer(sent), headers.get("x-api-key", ""))]
        if path in PAGES and method == "GET":
            given.append(password(sent).encode())
        if any(same(text, self.key) for text in given):
            return None
        if open_to_all:
            return 413, "without the API key this request may have no body", {"Connection": "close"}
        ask = {"WWW-Authenticate": 'Basic realm="oallama", charset="UTF-8"' if path in PAGES else "Bearer"}
        return 401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", ask


def has_body(headers: Headers) -> bool:
    """Whether a request says that a body follows its headers."""
    return headers.get("content-length", "0").strip("0") != "" or "transfer-encoding" in headers


def same(given: bytes, key: str) -> bool:
    """Compared in a time that says nothing of where they differ."""
    return hmac.compare_digest(given, key.encode())


def bearer(header: str) -> str:
    """The key of `Authorization: Bearer KEY`; empty where there is none."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def password(header: str) -> str:
    """The password of `Authorization: Basic …`; empty where there is none."""
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(text, validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no UTF-8 in it
        return ""


def host_name(host: str) -> str:
    """The name of a Host header, without its port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_local(name: str) -> bool:
    """Whether a name or address can only be this machine. A website may give its own name this machine's address (DNS
    rebinding), so no name is looked up."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
