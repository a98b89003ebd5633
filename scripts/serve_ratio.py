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
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from shared import guarded

from oallama.bench.arms import ArmMaker
from oallama.bench.prepare import shared_setting
from oallama.bench.process import ArmProcess
from oallama.bench.records import BenchTest, Sample, Series
from oallama.bench.rows import Value
from oallama.bench.schedule import measure_rounds
from oallama.bench.server_arm import IDLE_S, ServerArms
from oallama.bench.stats import speed_ratio
from oallama.placer import Placer


def compare(placer: Placer, policy: str, n_prompt: int, n_gen: int, rounds: int) -> dict[str, Any]:
    """Measure a policy's plan in both ways, A B B A, and return the ratios. Raises what planning and loading raise."""
    test = BenchTest(n_prompt, n_gen)
    spec = ArmMaker(placer, shared_setting(placer, [test]), (test,)).make(policy)
    with contextlib.ExitStack() as stack:
        arms = (ArmProcess(spec), ServerArms(placer).start(spec))
        for arm in arms:
            stack.callback(arm.close)
            arm.load([operator.name for operator in placer.operators])
            arm.warm_up([test])

        def visit(index: int, tests: Sequence[BenchTest]) -> Mapping[BenchTest, Sample]:
            time.sleep(IDLE_S)
            return arms[index].measure(tests)

        (series,) = measure_rounds(len(arms), [test], rounds, visit)
    prompt, token = ratio(series, lambda sample: sample.prompt_s), ratio(series, lambda sample: sample.gen_s / n_gen)
    return {"policy": policy, "prompt_s": prompt, "token_s": token}


def ratio(series: Series, value: Value) -> dict[str, Any]:
    """The server's speed relative to ours."""
    ours, server = ([value(sample) for sample in series.samples(arm)] for arm in (0, 1))
    if not ours:
        return {"ratio": None, "n": 0}
    interval = speed_ratio(ours, server)
    return {
        "here_s": median(ours),
        "server_s": median(server),
        "ratio": interval.value if interval else median(ours) / median(server),
        "ci95": [interval.low, interval.high] if interval else None,
        "n": len(ours),
        "samples_s": {"here": ours, "server": server},
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
    options = parser.parse_args()
    return guarded("serve_ratio", lambda: _compare_each(options))


def _compare_each(options: argparse.Namespace) -> int:
    placer = Placer.load(
        options.model, options.device, vram=options.vram, gpu_weights=options.gpu_weights, threads=options.threads
    )
    for policy in options.policies.split(","):
        print(json.dumps(compare(placer, policy, options.n_prompt, options.n_gen, options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
