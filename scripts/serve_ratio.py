#!/usr/bin/env python3
"""How fast llama-server computes a plan, beside the same plan in a process of ours: prompts and tokens, in turns.

    .venv/bin/python scripts/serve_ratio.py MODEL --device emulated:rtx3060-12 --vram 3GiB --policies oato,scheinfer

Both are arms of `bench`. The process of ours decodes and samples nothing; of llama-server its own timings are read, and
what it takes to choose the likeliest token counts as its time. Samples in which an emulated card was late are taken
again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from oallama.bench.arms import ArmMaker  # noqa: E402
from oallama.bench.prepare import shared_setting  # noqa: E402
from oallama.bench.process import ArmProcess  # noqa: E402
from oallama.bench.records import BenchTest  # noqa: E402
from oallama.bench.server_arm import IDLE_S, ServerArm, ServerArms  # noqa: E402
from oallama.bench.stats import speed_ratio  # noqa: E402
from oallama.core.errors import OallamaError  # noqa: E402
from oallama.device.emulated_link import TRIES  # noqa: E402
from oallama.placer import Placer  # noqa: E402


@dataclass(frozen=True)
class Times:
    """Seconds of the prompt, and of each token behind the first. fault: why they are no times of such a card."""

    prompt_s: float
    token_s: float
    fault: str = ""


def timed(arm: ArmProcess | ServerArm, test: BenchTest) -> Times:
    sample = arm.measure([test])[test]
    return Times(sample.prompt_s, sample.gen_s / test.n_gen, sample.fault)


def compare(placer: Placer, policy: str, n_prompt: int, n_gen: int, rounds: int) -> dict[str, Any]:
    """Measure a policy's plan in both ways, A B B A, and return the ratios. Raises what planning and loading raise."""
    test = BenchTest(n_prompt, n_gen)
    spec = ArmMaker(placer, shared_setting(placer, [test]), (test,)).make(policy)
    found: dict[str, list[Times]] = {"here": [], "server": []}
    with contextlib.ExitStack() as stack:
        arms = {"here": ArmProcess(spec), "server": ServerArms(placer).start(spec)}
        for arm in arms.values():
            stack.callback(arm.close)
            arm.load([operator.name for operator in placer.operators])
            arm.warm_up([test])

        def measured(way: str) -> Times:
            for tries_left in reversed(range(TRIES)):
                time.sleep(IDLE_S)
                times = timed(arms[way], test)
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
