#!/usr/bin/env python3
"""Stands in for llama-server: the same options and key, its answers to GET, texts of one letter, faults on request.

Options it knows: --host, --port, --device, --alias, -c. What it does besides is in the file that STUB_ORDERS names,
read anew at each request: words out of `loading` (health is 503), `busy` (so, and it computes meanwhile), `fail` (it
ends at its start), `fail-device` (so, with a device), `fail-rpc` (so, with an RPC server), `deaf` (it does not listen
yet).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = os.environ.get("LLAMA_API_KEY")


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


def ordered(word: str) -> bool:
    orders = Path(os.environ.get("STUB_ORDERS", os.devnull))
    return orders.exists() and word in orders.read_text(encoding="utf-8").split()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            begun = time.process_time()
            while ordered("busy") and time.process_time() - begun < 0.05:
                pass
            loading = ordered("loading") or ordered("busy")
            self.answer({"status": "loading" if loading else "ok"}, 503 if loading else 200)
        elif KEY is not None and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.answer({"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}, 401)
        elif self.path == "/props":
            self.answer({"default_generation_settings": {"n_ctx": int(option("-c"))}})
        elif self.path == "/metrics":
            print("stub: asked for /metrics", flush=True)
            text = "# HELP x\nllamacpp:tokens_predicted_total 30\nllamacpp:tokens_predicted_seconds_total 1.5\n"
            self.answer_bytes(text.encode(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self.answer({"object": "list", "data": [{"id": option("--alias"), "object": "model"}]})
        else:
            self.answer({"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": [5] * len(body["content"])})
        elif not body["stream"]:
            while body["n_predict"] < 0:  # for ever
                time.sleep(0.01)
            self.answer(self.event("a" * body["n_predict"], body["n_predict"]) | {"stop_type": "limit"})
        else:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            n = 0
            while n != body["n_predict"]:  # for ever where that is -1, until the connection is closed
                n += 1
                end = {"stop_type": "limit"} if n == body["n_predict"] else {}
                self.wfile.write(f"data: {json.dumps(self.event('a', n) | end)}\n\n".encode())
                time.sleep(0.01)
            self.close_connection = True

    def event(self, text: str, n: int) -> dict:
        timings = {"predicted_n": n, "predicted_ms": 1.0, "prompt_n": 1, "cache_n": 0}
        return {"content": text, "tokens": [5] * len(text), "timings": timings}

    def answer(self, document: dict, status: int = 200) -> None:
        self.answer_bytes(json.dumps(document).encode(), "application/json; charset=utf-8", status)

    def answer_bytes(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    address_family = socket.AF_INET6 if ":" in option("--host") else socket.AF_INET


if __name__ == "__main__":
    print("stub: starting", " ".join(sys.argv[1:]), flush=True)
    lost = ordered("fail-device") and option("--device") not in ("", "none")
    if ordered("fail") or lost or (ordered("fail-rpc") and "RPC" in option("--device")):
        print("error: the device is not here", flush=True)
        sys.exit(3)
    while ordered("deaf"):
        time.sleep(0.02)
    with Server((option("--host"), int(option("--port"))), Handler) as server:
        server.serve_forever()
