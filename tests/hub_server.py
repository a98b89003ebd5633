"""A Hugging Face hub on 127.0.0.1, as far as a download needs one: listings of repositories, and their files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """repositories: by USER/REPO, bytes by file. gated: those whose files are refused. cut_at: bodies break off at this
    byte of the file. status: of every answer. size: told of every file; None: the true one. asked: (method, path, Range
    header) of each request."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut_at: int | None = None
    status: int | None = None
    size: object = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def downloads(self) -> list[tuple[str, str | None]]:
        """(file, Range header) of each body that was asked for."""
        bodies = [asked for asked in self.asked if asked[0] == "GET" and "/resolve/" in asked[1]]
        return [(path.rpartition("/")[2], range) for _, path, range in bodies]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve it for the block, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            listed = re.fullmatch(r"/api/models/(.*)", path)
            repo, file = (listed[1], "") if listed else re.fullmatch(r"/(.*)/resolve/main/(.*)", path).groups()
            if hub.status is not None:
                self._send(hub.status, b"{}")
            elif repo not in hub.repositories:
                self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            elif listed:
                files = [self._entry(name, data) for name, data in sorted(hub.repositories[repo].items())]
                described = {"id": repo, "sha": COMMIT, "siblings": files}
                self._send(200, json.dumps(described).encode(), {"Content-Type": "application/json"})
            elif repo in hub.gated:
                self._send(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
            else:
                self._file(hub.repositories[repo][file])

        do_HEAD = do_GET

        def log_message(self, *values: object) -> None:
            pass

        def _entry(self, name: str, data: bytes) -> dict[str, object]:
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"sha256": digest, "size": len(data), "pointerSize": 100}
            return {
                "rfilename": name,
                "blobId": digest[:40],
                "size": len(data) if hub.size is None else hub.size,
                "lfs": lfs,
            }

        def _file(self, data: bytes) -> None:
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if start else 200, data[start:], headers, hub.cut_at and max(0, hub.cut_at - start))

        def _send(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, n_sent: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.close_connection = n_sent is not None
                self.wfile.write(body[:n_sent])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
