#!/usr/bin/env python3
"""How fast llama-server computes a plan, beside the same plan in a process of ours: prompts and tokens, in turns.

    .venv/bin/python scripts/serve_ratio.py MODEL --device emulated:rtx3060-12 --vram 3GiB --policies oato,scheinfer

The process of ours is an arm of `bench`: it decodes and samples nothing. llama-server is started as `serve` starts it,
and its own timings are read; what it takes to choose the likeliest token counts as its time. Samples in which an
emulated card was late are taken again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from oallama.bench.arms import ArmMaker  # noqa: E402
from oallama.bench.prepare import shared_setting  # noqa: E402
from oallama.bench.process import ArmProcess  # noqa: E402
from oallama.bench.records import BenchTest  # noqa: E402
from oallama.bench.stats import speed_ratio  # noqa: E402
from oallama.core.errors import DeviceError, OallamaError  # noqa: E402
from oallama.device.emulated_link import TRIES  # noqa: E402
from oallama.placer import Placer  # noqa: E402
from oallama.plan.plan import Plan  # noqa: E402
from oallama.run.address import free_address  # noqa: E402
from oallama.run.plugin_report import ask_report, punctuality  # noqa: E402
from oallama.run.process import ServerProcess, wait_until  # noqa: E402
from oallama.run.program import ServerSettings, find_program, launch  # noqa: E402
from oallama.run.weight_places import usable_plan  # noqa: E402

START_S, ANSWER_S, END_S = 1800.0, 3600.0, 5.0
IDLE_S = 0.3  # until an emulated card that has nothing to do leaves its core to another


@dataclass(frozen=True)
class Times:
    """Seconds of the prompt, and of each token behind the first. fault: why they are no times of such a card."""

    prompt_s: float
    token_s: float
    fault: str = ""


class Server:
    """A llama-server under a plan."""

    def __init__(self, pid: int, url: str, folder: Path) -> None:
        self._pid, self._url, self._folder = pid, url, folder

    def times(self, tokens: Sequence[int], n_gen: int) -> Times:
        """One answer to a prompt. Raises DeviceError."""
        before, start_s = ask_report(self._folder, self._pid, 10.0), time.perf_counter()
        body = {"prompt": list(tokens), "n_predict": n_gen, "cache_prompt": False, "ignore_eos": True,
                "temperature": 0, "samplers": ["temperature"]}  # fmt: skip
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                timings: dict[str, Any] = json.load(answer)["timings"]
        except (OSError, ValueError, KeyError) as error:
            raise DeviceError(f"llama-server does not answer: {error}") from None
        elapsed_s, after = time.perf_counter() - start_s, ask_report(self._folder, self._pid, 10.0)
        kept = punctuality(before, after, elapsed_s) if before and after else None
        decoded = timings["predicted_n"] - 1  # the first token comes of the prompt
        fault = kept.fault if kept is not None else ""
        return Times(1e-3 * timings["prompt_ms"], 1e-3 * timings["predicted_ms"] / decoded, fault)


@contextlib.contextmanager
def server(placer: Placer, plan: Plan, folder: Path) -> Iterator[Server]:
    """Start llama-server as `serve` does, for one request at a time, and end it. Raises DeviceError."""
    address = free_address("127.0.0.1", 0, None)
    settings = ServerSettings(address, 1, placer.threads, None, Path(placer.model.path).name, None, cache_mib=0)
    usable, _ = usable_plan(plan, placer.operators)
    started = launch(
        find_program(None), usable, placer.operators, placer.model.n_layer, placer.tensor_names, settings, folder,
        os.environ,
    )  # fmt: skip
    process = ServerProcess(started)
    try:
        wait_until(lambda: process.has_ended or address.is_healthy(process.pid, 2.0), START_S)
        if process.has_ended or not address.is_healthy(process.pid, 2.0):
            why = process.how_it_ended() if process.has_ended else f"it does not answer after {START_S:.0f} s"
            raise DeviceError(f"llama-server does not start: {why}")
        yield Server(process.pid, address.url, folder)
    finally:
        process.end(END_S)


def here(arm: ArmProcess, tests: Sequence[BenchTest]) -> Times:
    prompt, tokens = (arm.measure([test])[test] for test in tests)
    return Times(prompt.prompt_s, tokens.gen_s / tests[1].n_gen, prompt.fault or tokens.fault)


def compare(placer: Placer, policy: str, n_prompt: int, n_gen: int, rounds: int) -> dict[str, Any]:
    """Measure a policy's plan in both ways, A B B A, and return the ratios. Raises what planning and loading raise."""
    tests = BenchTest(n_prompt, 0), BenchTest(0, n_gen, n_prompt)
    setting = shared_setting(placer, tests)
    maker = ArmMaker(placer, setting, tests)
    arm = maker.make(policy)
    plan = replace(Plan.from_json(dict(arm.plan or {}), "the plan"), device=setting.load.device)
    rng = random.Random(0)
    prompt = [rng.randrange(3, placer.model.n_vocab) for _ in range(n_prompt)]
    found: dict[str, list[Times]] = {"here": [], "server": []}
    with tempfile.TemporaryDirectory(prefix="oallama-serve-ratio-") as name, contextlib.ExitStack() as stack:
        process = ArmProcess(arm)
        stack.callback(process.close)
        process.load([operator.name for operator in placer.operators])
        process.warm_up(tests)
        served = stack.enter_context(server(placer, plan, Path(name)))
        served.times(prompt, 4)  # warms up

        def measured(way: str) -> Times:
            for tries_left in reversed(range(TRIES)):
                time.sleep(IDLE_S)
                times = here(process, tests) if way == "here" else served.times(prompt, n_gen)
                if not times.fault or not tries_left:
                    break
            return times

        for _ in range(rounds):
            pairs = [[(way, measured(way)) for way in order] for order in (("here", "server"), ("server", "here"))]
            for pair in pairs:
                if not any(times.fault for _, times in pair):  # late samples are refused, with their partners
                    for way, times in pair:
                        found[way].append(times)
                else:
                    print(f"{policy}: refused: {next(t.fault for _, t in pair if t.fault)}", file=sys.stderr)
    return {"policy": policy, **{what: _ratio(found, what) for what in ("prompt_s", "token_s")}}


def _ratio(found: dict[str, list[Times]], what: str) -> dict[str, Any]:
    ours, theirs = ([getattr(times, what) for times in found[way]] for way in ("here", "server"))
    if not ours:
        return {"ratio": None, "n": 0}
    ratio = speed_ratio(ours, theirs)
    return {
        "here_s": median(ours),
        "server_s": median(theirs),
        "ratio": ratio.value if ratio else median(ours) / median(theirs),
        "ci95": [ratio.low, ratio.high] if ratio else None,
        "n": len(ours),
        "samples_s": {"here": ours, "server": theirs},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="emulated")
    parser.add_argument("--vram")
    parser.add_argument("--gpu-weights")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--policies", default="oato,scheinfer", help="comma-separated; experts for an MoE")
    parser.add_argument("-p", type=int, default=256, dest="n_prompt")
    parser.add_argument("-n", type=int, default=32, dest="n_gen")
    parser.add_argument("-r", type=int, default=6, dest="rounds", help="rounds of A B B A")
    asked = parser.parse_args()
    try:
        placer = Placer.load(
            asked.model, asked.device, vram=asked.vram, gpu_weights=asked.gpu_weights, threads=asked.threads
        )
        for policy in asked.policies.split(","):
            print(json.dumps(compare(placer, policy, asked.n_prompt, asked.n_gen, asked.rounds)), flush=True)
    except OallamaError as error:
        print(f"serve_ratio: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
