#!/usr/bin/env python3
"""Processor seconds that `oallama serve` itself spends on 1,000 streamed tokens, and on a request.

usage: .venv/bin/python scripts/serve_cost.py [--clients 1,8] [-n 500] [--gap 5] [--rounds 5] [-o FILE]

Behind it a stand-in for llama-server sends one event a token to every client, the next after so many milliseconds.
What is counted is the user and system time of our process alone: the stand-in and the clients are processes of their
own. So figures hold on a machine that others use too, though not beside those of another machine. JSON: every sample.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.command import write_document

ROOT = Path(__file__).resolve().parents[1]
EVENT = {
    "choices": [{"finish_reason": None, "index": 0, "delta": {"content": " sea"}}], "created": 1795435200,
    "id": "chatcmpl-0123456789abcdefghijklmnopqrstuv", "model": "model.gguf", "system_fingerprint": "b1-0000000",
    "object": "chat.completion.chunk",
}  # fmt: skip
PART = f"data: {json.dumps(EVENT)}\n\n".encode()
HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nKeep-Alive: timeout=5, max=100\r\n"
DONE = b"data: [DONE]\n\n"
STREAM = HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SHORT = HEAD + b"Content-Type: application/json; charset=utf-8\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}'


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    if options.role is not None:
        ROLES[options.role](options)
        return
    with running(options) as (port, pid):
        samples = []
        for clients in options.clients:
            taken = [sample(port, pid, clients, options.n_gen) for _ in range(options.rounds + 1)][1:]  # one to warm up
            per_token = [seconds / (clients * options.n_gen) for seconds in taken]
            samples.append({"clients": clients, "cpu_s_per_1000_tokens": [1000 * s for s in per_token]})
        taken = [sample(port, pid, options.n_requests, 0) / options.n_requests for _ in range(options.rounds + 1)][1:]
        samples.append({"requests": options.n_requests, "cpu_ms_per_request": [1000 * s for s in taken]})
    for row in samples:
        (figures,) = (values for values in row.values() if isinstance(values, list))
        row["median"] = statistics.median(figures)
    write_document({"gap_ms": options.gap_ms, "n_gen": options.n_gen, "samples": samples}, options.output)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("-n", dest="n_gen", type=int, default=500, help="tokens of an answer")
    parser.add_argument("--gap", dest="gap_ms", type=float, default=5.0, help="milliseconds between tokens")
    parser.add_argument("--requests", dest="n_requests", type=int, default=64, help="short ones, at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", dest="output", help="default: stdout")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(port, process id) of our server over the stand-in."""
    command = [sys.executable, __file__, "--role", "server", "--gap", str(options.gap_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            sys.exit("error: the server does not start")
        yield int(line), process.pid
    finally:
        process.send_signal(2)
        process.wait(30)


def sample(port: int, pid: int, clients: int, n_gen: int) -> float:
    """Processor seconds of the server while so many clients get their answers."""
    before = cpu_seconds(pid)
    asked = json.dumps([clients, n_gen])
    subprocess.run(
        [sys.executable, __file__, "--role", "clients", "--at", str(port)], input=asked, text=True, check=True
    )
    return cpu_seconds(pid) - before


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, to the nanosecond where Linux counts it."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


#
# the server, the stand-in and the clients, each a process
#


def server_role(options: argparse.Namespace) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
    from placement_records import on_cpu, served

    from oallama.serve.server import Placements, listen, serve
    from oallama.serve.supervisor import Launch

    def launch(_: Any, path: Path) -> Launch:
        command = (sys.executable, __file__, "--role", "stand-in", "--at", str(path), "--gap", str(options.gap_ms))
        return Launch(command, dict(os.environ), False)

    sock = listen("127.0.0.1", 0, None)

    def talk(sentence: str) -> None:
        if "serving at" in sentence:
            print(sock.getsockname()[1], flush=True)

    serve(sock, None, Placements(on_cpu(served()), None, launch), talk)


def stand_in_role(options: argparse.Namespace) -> None:
    gap_s = options.gap_ms / 1000

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = json.loads(await reader.readexactly(length[0])) if length and length[0] else {}
            if not body.get("stream"):
                writer.write(SHORT)
                await reader.read(1)  # llama-server keeps the connection
                return
            writer.write(STREAM)
            loop = asyncio.get_running_loop()
            for _ in range(body.get("n_predict") or body["max_tokens"]):
                due_s = (loop.time() // gap_s + 1) * gap_s  # as in a batch: all clients at once
                await asyncio.sleep(due_s - loop.time())
                writer.write(b"%x\r\n%s\r\n" % (len(PART), PART))
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE))
            await reader.read(1)
        writer.close()

    async def work() -> None:
        async with await asyncio.start_unix_server(answer, options.at) as server:
            await server.serve_forever()

    asyncio.run(work())


def clients_role(options: argparse.Namespace) -> None:
    clients, n_gen = json.loads(sys.stdin.read())

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(options.at))
        body = json.dumps({"stream": bool(n_gen), "n_predict": n_gen}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
        raw = await reader.read()
        writer.close()
        if raw.count(b"data: {") != n_gen or b" 200 " not in raw[:20]:
            sys.exit(f"error: {raw.count(b'data: {')} of {n_gen} tokens came: {raw[:300]!r}")

    async def work() -> None:
        await asyncio.gather(*(ask() for _ in range(clients)))

    asyncio.run(work())


ROLES = {"server": server_role, "stand-in": stand_in_role, "clients": clients_role}

if __name__ == "__main__":
    main()
