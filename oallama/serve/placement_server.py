"""The placement page: `GET /placement` and a page that shows it, on a separate loopback port."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ggml_bridge.threads import Thread
from oallama.run.address import host_name, is_local

REQUEST_S = 20.0  # seconds that a client may take

Content = tuple[str, dict[str, str], str]
"""Content type, further headers, text."""


class _Server(ThreadingHTTPServer):
    contents: dict[str, Callable[[], Content]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version, sys_version = "oallama", ""

    def do_GET(self) -> None:
        content = self.server.contents.get(self.path.partition("?")[0])
        if not is_local(host_name(self.headers.get("Host", ""))):  # against DNS rebinding
            self.send_error(403, "Use localhost to reach this server")
        elif content is None:
            self.send_error(404)
        else:
            kind, headers, text = content()
            self.send_response(200)
            always = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
            for name, value in ({"Content-Type": kind} | always | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def placement_server(
    document: Callable[[], dict[str, Any]], page: Callable[[], tuple[str, str]], port: int = 0
) -> Iterator[str]:
    """Answer during the block. document: returns /placement; page: returns the text of / and its
    Content-Security-Policy. Both are called in other threads. port 0: any free port. Yields the URL. Raises OSError if
    the port is in use."""

    def told() -> Content:
        return "application/json", {}, json.dumps(document(), allow_nan=False)

    def shown() -> Content:
        text, policy = page()
        return "text/html; charset=utf-8", {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}, text

    with _Server(("127.0.0.1", port), _Handler) as server:
        server.contents = {"/": shown, "/placement": told}
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
