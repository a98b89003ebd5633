"""Memory that stays after many tokens of `oallama serve`, of random lengths, with requests given up at random."""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from experiments.servers import running

from ggml_bridge.library import library_folder, soname
from measure.divergence import profile_of
from measure.measure import Measure, MeasureStep, add_soak, soak_steps
from measure.slope import pooled_slope
from oallama import Placer
from oallama.serve.program import find_program

Sample = dict[str, Any]
End = Literal["done", "given up", "failed"]

N_CLIENTS = 4
SAMPLE_S = 1.0
N_CTX = 512  # of all clients together
MIB = 1 << 20
SERVE_COST = Path(__file__).resolve().parents[1] / "serve_cost.py"
GIVEN_UP = 0.4  # of the requests


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    return soak_steps(options, options.tokens, "server", _serve)


def _serve(path: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One `oallama serve` until its clients have been sent so many tokens."""
    import httpx
    import psutil

    with tempfile.TemporaryDirectory() as folder, _serving(path, options, Path(folder)) as (process, url):
        totals = {"tokens": 0, "requests": 0, "given_up": 0, "failed": 0}
        lock, enough = threading.Lock(), threading.Event()

        def client(number: int) -> None:
            rng = random.Random(1000 * seed + number)
            with httpx.Client(base_url=url, timeout=120) as http:
                while not enough.is_set():
                    most = rng.randint(1, options.answer)
                    asked = {
                        "prompt": [rng.randrange(3, 700) for _ in range(rng.randint(1, options.prompt))],
                        "max_tokens": most, "temperature": 0.8, "seed": rng.randrange(1 << 30),
                        "stream": True, "ignore_eos": True,
                    }  # fmt: skip
                    leaves = rng.random() < GIVEN_UP
                    n, end = _asked(http, asked, rng.randrange(most) if leaves else None)
                    with lock:
                        totals["tokens"] += n
                        totals["requests"] += 1
                        totals["given_up"] += end == "given up"
                        totals["failed"] += end == "failed"

        clients = [threading.Thread(target=client, args=(number,)) for number in range(N_CLIENTS)]
        samples = [_held(process, totals)]
        for thread in clients:
            thread.start()
        try:
            end = time.monotonic() + 60 * options.minutes
            while totals["tokens"] < options.each and time.monotonic() < end:
                time.sleep(SAMPLE_S)
                samples.append(_held(process, totals))
                print(f"\r{totals['tokens']} tokens of {options.each}", end="", file=sys.stderr, flush=True)
        finally:
            enough.set()
            for thread in clients:
                thread.join()
        time.sleep(2 * SAMPLE_S)  # what was aborted last is ended by now
        samples.append(_held(process, totals))
        print(file=sys.stderr)
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    left = sum(psutil.pid_exists(pid) for pid in family)
    return {**totals, "samples": samples, "exit_code": process.returncode, "processes_left": left}


def _asked(http: Any, asked: Mapping[str, Any], leave_after: int | None) -> tuple[int, End]:
    """Tokens that came of one request, and how it ended. leave_after: tokens after which the client goes; None: at the
    end."""
    n = 0
    with http.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            return 0, "failed"
        for line in answer.iter_lines():
            if n == leave_after:
                return n, "given up"
            if line == "data: [DONE]":
                return n, "done"
            n += line.startswith('data: {"choices"')
    return n, "failed"


@contextlib.contextmanager
def _serving(path: str, options: argparse.Namespace, folder: Path) -> Iterator[tuple[Any, str]]:
    """A server over llama-server without its prompt cache (--cache-ram: 8 GiB of host memory that fill with old
    prompts on purpose), or over a stand-in, and where it is reached; ended when the block ends."""
    own = folder / "llama-server"
    own.write_text(_started(options))
    own.chmod(0o755)
    (folder / soname("ggml-base")).symlink_to(library_folder() / soname("ggml-base"))  # whose version is asked for
    log = folder / "serve.log"
    command = [sys.executable, "-m", "oallama", "serve", path, "--port", "0", "--llama-server", str(own), "-t", "1",
               "-c", str(N_CTX), "-np", str(N_CLIENTS), *placement(path, options, folder)]  # fmt: skip

    def answer() -> str:
        serving = re.search(r"serving at (http://\S+)/v1", log.read_text(errors="replace"))
        return serving[1] if serving else ""

    with running(command, log, answer) as served:
        yield served


def _started(options: argparse.Namespace) -> str:
    """The script that stands for llama-server: the real one, or the stand-in of serve_cost, which streams at once."""
    if options.stand_in:
        stand_in = f'"{sys.executable}" "{SERVE_COST}" --role stand-in --gap 0.001'
        return f'#!/bin/sh\nwhile [ "$1" != --host ]; do shift; done\nexec {stand_in} --at "$2"\n'
    return f'#!/bin/sh\nexec "{find_program(options.llama_server)}" "$@" --cache-ram 0\n'


def placement(path: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Streams and slices on a worker of this machine, planned for a described card; or none."""
    if options.device == "none":
        return ["--device", "none", "--n-prompt", "256", "--n-gen", "32"]
    placer = Placer.load(path, device="cpu-pair", profile=profile_of(path), gpu_weights=0.3, threads=1)
    plan = placer.plan("scheinfer", n_prompt=256, n_gen=32, n_ctx=N_CTX)
    replace(plan, device=options.device).save(folder / "plan.json")
    return ["--plan", str(folder / "plan.json")]


def _held(process: Any, totals: Mapping[str, int]) -> Sample:
    """Of each process of the family by its role."""
    import psutil

    sample: Sample = dict(totals)
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            words = one.cmdline()
            role = ("llama-server" if "llama-server" in words[0] or "stand-in" in words
                    else "worker" if "ggml_bridge.rpc_server" in words else "serve")  # fmt: skip
            status = Path(f"/proc/{one.pid}/status").read_text()
            sample[role] = {
                "anonymous": int(status.split("RssAnon:")[1].split()[0]) << 10,
                "descriptors": one.num_fds(),
                "threads": one.num_threads(),
            }
    return sample


ROLES = ("serve", "llama-server", "worker")
WARM = 0.2
"""Of a server's samples: while its slots, threads and the allocator's arenas fill for the first time."""


def settled(data: Mapping[str, Any], role: str) -> list[tuple[int, Sample]]:
    """(tokens, what the process held), without the first share."""
    samples = [(sample["tokens"], sample[role]) for sample in data["samples"] if role in sample]
    return samples[int(WARM * len(samples)) :]


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for role in ROLES:
        if not all(role in data["samples"][-1] for _, data in found):
            continue
        series = [settled(data, role) for _, data in found]
        gradient, half = pooled_slope([
            ([tokens for tokens, _ in one], [held["anonymous"] for _, held in one]) for one in series
        ])  # fmt: skip
        ends = [(data["samples"][0][role], data["samples"][-1][role]) for _, data in found]
        rows.append((
            role, *(sum(data[key] for _, data in found) for key in ("tokens", "requests", "given_up", "failed")),
            ", ".join(f"{first['anonymous'] / MIB:.1f} to {last['anonymous'] / MIB:.1f}" for first, last in ends),
            f"{1e3 * gradient:+.0f} ± {1e3 * half:.0f}",
            *(", ".join(f"{first[key]} to {last[key]}" for first, last in ends) for key in ("descriptors", "threads")),
            sum(data["processes_left"] for _, data in found),
        ))  # fmt: skip
    return rows


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_soak(parser, "rpc-worker", "tokens", 100_000, 25_000)
    parser.add_argument("--prompt", type=int, default=40, help="tokens of a prompt at most (default: 40)")
    parser.add_argument("--answer", type=int, default=80, help="tokens of an answer at most (default: 80)")
    parser.add_argument("--stand-in", action="store_true", help="no llama-server, but what streams as fast as asked")
    parser.add_argument("--llama-server", metavar="FILE", help="(default: that of scripts/stock_binaries)")


MEASURE = Measure(
    "what the processes of `oallama serve` hold after many tokens of random lengths, two requests of five given up",
    _add_options, _steps,
    ("process", "tokens", "requests", "given up", "failed", "resident (MiB)", "resident (bytes per 1,000 tokens)",
     "descriptors", "threads", "processes left"),
    _rows,
)  # fmt: skip
