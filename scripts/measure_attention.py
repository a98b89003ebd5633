#!/usr/bin/env python3
"""Measure attention without flash attention against attention with it, on the CPU, at several depths.

Both arms are contexts of one loaded model; a round runs every depth on both, in an order that turns around every other
round; ratios are taken within a round. Above 1: without flash attention is faster.

    scripts/measure_attention.py MODEL ... [-t 2] [-d 0,128,512,2048,4096] [-p 512] [-n 16] [-r 6] [-o FILE.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from oallama.bench.records import BenchTest
from oallama.bench.timing import Timer, bench_tokens
from oallama.core.types import Attention
from oallama.device.cpu import default_threads
from oallama.device.load_params import LoadSettings, ModelParams, apply_context, load_bridge
from oallama.device.native_log import native_log

ARMS = ("on", "off")


class Arms:
    """A model with one context for each way of attention."""

    def __init__(self, path: str, n_ctx: int, n_threads: int) -> None:
        from llama_cpp import llama_cpp as api

        settings = LoadSettings(path=path, n_ctx=n_ctx, n_threads=n_threads)
        params = api.llama_model_default_params()
        placement = ModelParams(settings, 0, load_bridge())
        placement.apply(params)
        with native_log():
            self.model = api.llama_model_load_from_file(path.encode(), params)
            n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
            tokens = bench_tokens(n_ctx, n_vocab, seed=0, first=None)
            self.timers: dict[str, Timer] = {}
            for arm in ARMS:
                context_params = api.llama_context_default_params()
                apply_context(LoadSettings(path, n_ctx=n_ctx, attention=Attention(arm)), n_threads, context_params)  # type: ignore[arg-type]
                self.timers[arm] = Timer(api.llama_init_from_model(self.model, context_params), 2048, tokens)


def measure(path: str, depths: list[int], n_prompt: int, n_gen: int, n_threads: int, rounds: int) -> dict[str, Any]:
    """Raw seconds of every test by arm, round by round, and the quartiles of on / off."""
    n_ctx = -(-(max(depths) + max(n_prompt, n_gen)) // 256) * 256
    arms = Arms(path, n_ctx, n_threads)
    cases = []
    for depth in depths:
        tests = {"prefill": BenchTest(n_prompt, 0, depth), "decode": BenchTest(0, n_gen, depth)}
        for phase, test in tests.items():
            samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for i in tqdm(range(rounds + 1), desc=f"{phase} at {depth}", disable=not sys.stderr.isatty()):
                for arm in ARMS if i % 2 else ARMS[::-1]:
                    sample = arms.timers[arm].sample(test)
                    if i:  # the first round warms up
                        samples[arm].append(sample.prompt_s if phase == "prefill" else sample.gen_s / n_gen)
            ratios = [on / off for on, off in zip(samples["on"], samples["off"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cases.append({
                "phase": phase, "depth": depth, "seconds": samples,
                "off_speed": {"median": middle, "q1": low, "q3": high},
            })  # fmt: skip
            name = f"{Path(path).stem} t={n_threads} {phase:7} at {depth:5}"
            print(f"{name}: off is {middle:.2f} ({low:.2f}..{high:.2f})", file=sys.stderr, flush=True)
    return {
        "model": Path(path).stem, "n_threads": n_threads, "n_prompt": n_prompt, "n_gen": n_gen, "n_ctx": n_ctx,
        "cases": cases,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("-t", "--threads", default=str(default_threads()), help="thread counts, comma separated")
    parser.add_argument("-d", "--depths", default="0,128,512,2048,4096")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=16)
    parser.add_argument("-r", "--rounds", type=int, default=6)
    parser.add_argument("-o", "--output", help="JSON file of the raw samples; default: stdout")
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    runs = [
        measure(path, depths, args.n_prompt, args.n_gen, int(threads), args.rounds)
        for threads in args.threads.split(",")
        for path in args.models
    ]
    text = json.dumps({"machine": platform.processor() or platform.machine(), "runs": runs}, indent=1) + "\n"
    if args.output:
        Path(args.output).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
