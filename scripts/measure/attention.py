"""Attention without flash attention against attention with it, on the CPU, at several depths."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from experiments.generation import Sample, interleaved

from measure.measure import Measure, Step, add_common, column, name_of, numbers, ratio_text
from oallama.bench.records import BenchTest
from oallama.bench.timing import Timer, bench_tokens
from oallama.device.load_params import FlashAttention, LoadSettings, ModelParams, apply_context, load_bridge
from oallama.device.native_log import native_log

ARMS: tuple[FlashAttention, ...] = ("on", "off")


def _timers(path: str, n_ctx: int, n_threads: int) -> dict[str, Timer]:
    """A context for each way of attention, of one loaded model."""
    from llama_cpp import llama_cpp as api

    params = api.llama_model_default_params()
    ModelParams(LoadSettings(path=path, n_ctx=n_ctx, n_threads=n_threads), 0, load_bridge()).apply(params)
    timers: dict[str, Timer] = {}
    with native_log():
        model = api.llama_model_load_from_file(path.encode(), params)
        n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        tokens = bench_tokens(n_ctx, n_vocab, seed=0, first=None)
        for arm in ARMS:
            context = api.llama_context_default_params()
            apply_context(LoadSettings(path, n_ctx=n_ctx, flash_attn=arm), n_threads, context)
            timers[arm] = Timer(api.llama_init_from_model(model, context), 2048, tokens)
    return timers


def _steps(options: argparse.Namespace) -> Iterator[Step]:
    for path in options.files:
        for threads in options.threads:
            yield Step(f"{name_of(path)}, {threads} threads", path, partial(_measure, path, threads, options))


def _measure(path: str, threads: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a prompt, and of a token, behind so many others, round by round, for each arm."""
    n_prompt, n_gen = options.n_prompt, options.n_gen
    timers = _timers(path, -(-(max(options.depths) + max(n_prompt, n_gen)) // 256) * 256, threads)

    def sample(arm: str, test: BenchTest) -> Sample:
        made = timers[arm].sample(test)
        return {"seconds": made.gen_s / n_gen if test.n_gen else made.prompt_s}

    cases = []
    for depth in options.depths:
        for phase, test in (("prefill", BenchTest(n_prompt, 0, depth)), ("decode", BenchTest(0, n_gen, depth))):
            samples = interleaved({arm: partial(sample, arm, test) for arm in ARMS}, options.rounds)
            cases.append({"phase": phase, "depth": depth, "samples": samples})
    return cases


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    return [
        (step, case["phase"], case["depth"],
         ratio_text(*(column(case["samples"][arm], "seconds") for arm in ARMS)))
        for step, cases in found for case in cases
    ]  # fmt: skip


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, n_prompt=512, n_gen=16, rounds=6)
    parser.set_defaults(device="none")
    parser.add_argument("-d", "--depths", type=numbers, default=[0, 128, 512, 2048, 4096], metavar="N,…")


MEASURE = Measure(
    "speed without flash attention over speed with it, on the CPU", _add_options, _steps,
    ("model", "phase", "depth", "times as fast without"), _rows,
)  # fmt: skip
