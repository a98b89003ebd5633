#!/usr/bin/env python3
"""Tokens/s of `oallama serve` against llama-server started by hand: with the same placement, and with its own --fit.

usage: .venv/bin/python scripts/serve_throughput.py MODEL [--plan PLAN] [--clients 1,4,8] [-n 64] [-t N] [--rounds 6]
       [-o FILE]

All servers run at once, so device and host must hold the model as often as there are arms; idle ones compute nothing.
A sample is what N clients that stream at the same time get together, the shared port and parsing included: tokens over
the time from the first request to the last token. Arms take turns A B C C B A; the first round is thrown away. JSON:
every sample, and the ratio of `oallama serve` to the others with a 95 % interval (oallama/bench/stats.py).
Without --plan everything is on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from experiments.command import write_document
from experiments.servers import running

OURS, SAME, FIT = "oallama-serve", "llama-server-same", "llama-server-fit"
PROMPT = "Once upon a time there was a {} who lived by the sea."
WHO = ("fox", "dog", "girl", "boy", "cat", "bird", "king", "bear")


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    from oallama.bench.stats import speed_ratio
    from oallama.serve.program import find_program

    program = find_program(options.llama_server)
    counts = tuple(options.clients)
    seconds: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in counts}
    tokens: dict[int, dict[str, list[int]]] = {n: defaultdict(list) for n in counts}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-throughput-")))
        plan = options.plan or made_plan(options.model, options.context, folder)
        ports = {arm: free_port() for arm in (OURS, SAME, FIT)}
        for arm, port in ports.items():
            started, env = command(arm, options, plan, program, port, folder)
            stack.enter_context(running(started, folder / f"{arm}.log", partial(healthy, port), env))
        arms = list(ports)
        for turn in range(options.rounds + 1):
            for n in counts:
                for arm in [*arms, *reversed(arms)]:
                    took_s, n_tokens = sample(ports[arm], n, options.n_gen, turn)
                    if turn:  # the first one warms up
                        seconds[n][arm].append(took_s)
                        tokens[n][arm].append(n_tokens)
            print(f"round {turn} of {options.rounds}", file=sys.stderr)
    rows = []
    for n in counts:
        per_token = {
            arm: [s / max(t, 1) for s, t in zip(seconds[n][arm], tokens[n][arm], strict=True)] for arm in seconds[n]
        }
        for arm in (OURS, SAME, FIT):
            rates = [1 / value for value in per_token[arm]]
            row = {
                "clients": n,
                "arm": arm,
                "tokens_per_s": statistics.median(rates),
                "samples": rates,
                "tokens": tokens[n][arm],
            }
            if arm != OURS:
                ratio = speed_ratio(per_token[arm], per_token[OURS])
                row["ours_over_this"] = None if ratio is None else asdict(ratio)
            rows.append(row)
    load = {"load_average": os.getloadavg(), "cpus": os.cpu_count()}
    document = {
        "model": Path(options.model).name,
        "n_gen": options.n_gen,
        "n_threads": options.threads,
        "load": load,
        "rows": rows,
    }
    write_document(document, options.output)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--plan", help="the placement of the first two arms; default: all on the CPU")
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 8])
    parser.add_argument("-n", dest="n_gen", type=int, default=64, help="tokens each client asks for")
    parser.add_argument("-c", dest="context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("-t", "--threads", type=int, help="of every server that computes; default: of oallama")
    parser.add_argument("--llama-server", help="default: as `oallama serve`")
    parser.add_argument("-o", dest="output", help="default: stdout")
    return parser.parse_args(arguments)


def made_plan(model: str, context: int, folder: Path) -> str:
    """Everything on the CPU, as a plan file."""
    from oallama import Placer

    plan = folder / "plan.json"
    placer = Placer.load(model, device="none")
    placer.cpu_plan(placer.workload(64, 64, context)).save(plan)
    return str(plan)


def command(
    arm: str, options: argparse.Namespace, plan: str, program: Path, port: int, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """What starts an arm, and its environment."""
    from oallama import Placer, Plan
    from oallama.serve.program import ServerSettings, clean_environment, launch

    if arm == OURS:
        made = [sys.executable, "-m", "oallama", "serve", options.model, "--plan", plan, "-c", str(options.context)]
        threads = ["-t", str(options.threads)] if options.threads else []
        return [*made, *threads, "--port", str(port), "-np", "8", "--llama-server", str(program)], dict(os.environ)
    placer = Placer.load(options.model, device="none", threads=options.threads)
    if arm == FIT:
        made = [str(program), "-m", options.model, "-c", str(options.context), "--parallel", "8", "--kv-unified"]
        made += ["--threads", str(placer.threads), "--host", "127.0.0.1", "--port", str(port)]
        return made, clean_environment(os.environ)
    settings = ServerSettings(8, placer.threads, None, Path(options.model).name, "mean")
    started = launch(
        program,
        Plan.load(plan),
        placer.operators,
        placer.model.n_layer,
        placer.tensor_names,
        settings,
        folder / "s.sock",
        os.environ,
    )
    host_index = started.command.index("--host")
    made = [
        *started.command[:host_index],
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *started.command[host_index + 2 :],
    ]
    return made, dict(started.environment)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def sample(port: int, n_clients: int, n_gen: int, turn: int) -> tuple[float, int]:
    """(seconds, tokens) of so many clients at once."""
    prompts = [f"{turn}: " + PROMPT.format(WHO[number % len(WHO)]) for number in range(n_clients)]
    with ThreadPoolExecutor(n_clients) as pool:
        start_s = time.perf_counter()
        counts = list(pool.map(lambda prompt: completion(port, prompt, n_gen), prompts))
        return time.perf_counter() - start_s, sum(counts)


def completion(port: int, prompt: str, n_gen: int) -> int:
    """Tokens of one streamed answer."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked = {
        "prompt": prompt, "n_predict": n_gen, "stream": True, "ignore_eos": True, "temperature": 0,
        "cache_prompt": False,
    }  # fmt: skip
    link.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
    answer = link.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode(errors="replace"))
    last: dict[str, Any] = {}
    for line in answer:
        if line.startswith(b"data: {"):
            last = json.loads(line[6:])
    link.close()
    return int(last["tokens_predicted"])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
