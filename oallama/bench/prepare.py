"""Prepares a comparison: tests, the shared setting, its memory cap, and the arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oallama.bench.ab import Bench
from oallama.bench.arms import STOCK_BEST, STOCK_CPU, STOCK_FIT, ArmMaker
from oallama.bench.records import BenchTest, Setting
from oallama.core.errors import UsageError
from oallama.core.options import DEFAULT_BATCH, DEFAULT_UBATCH
from oallama.placer import Placer
from oallama.placer.stock import memory_cap, stock_load

CONTEXT_STEP = 256  # llama.cpp pads the KV cache to it
REQUEST_TOKENS = 2  # of a request beside the test: a prompt has one at least, and an answer one that is not timed


def bench_tests(
    n_prompt: Sequence[int], n_gen: Sequence[int], pairs: Sequence[tuple[int, int]], n_depth: Sequence[int]
) -> tuple[BenchTest, ...]:
    """Make every combination of the counts, as llama-bench does; a count of 0 means no test. Raises UsageError if no
    test remains."""
    shapes = [*((n, 0) for n in n_prompt if n), *((0, n) for n in n_gen if n), *pairs]
    tests = tuple(dict.fromkeys(BenchTest(p, g, depth) for depth in n_depth for p, g in shapes))
    if not tests:
        raise UsageError("nothing to time; give -p, -n or -pg a count above 0")
    return tests


def default_arms(placer: Placer) -> tuple[str, ...]:
    """The default arms: stock llama.cpp at its strongest, and ours; with several devices --fit over all and on each."""
    if placer.members:
        return (STOCK_FIT, *(f"{STOCK_FIT}@{number}" for number in range(len(placer.members))), "auto")
    return (STOCK_BEST if placer.has_device else STOCK_CPU, "auto")


def setting_of(
    placer: Placer, n_ctx: int, n_ubatch: int, n_batch: int = DEFAULT_BATCH, of_text: bool = False
) -> Setting:
    """The placer's device, threads, attention and memory cap for arms. Raises what a no_alloc load raises."""
    load = stock_load(placer, n_ctx, n_ubatch, n_batch)
    return Setting(load, memory_cap(placer, load), of_text)


def shared_setting(placer: Placer, tests: Sequence[BenchTest], n_parallel: int = 1) -> Setting:
    """The setting that all arms share, from the placer's options. Without -c the context holds the longest prompt,
    generation and depth of the tests together, of n_parallel requests at once, for which plans are made.

    Raises UsageError for a context that is too short.
    """
    options = placer.options
    longest = sum(max(count) for count in zip(*((t.n_prompt, t.n_gen, t.n_depth) for t in tests), strict=True))
    needed = longest if n_parallel == 1 else n_parallel * (longest + REQUEST_TOKENS)
    n_ctx = options.n_ctx or -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    if n_ctx < needed:
        of_requests = f" of {n_parallel} requests" if n_parallel > 1 else ""
        raise UsageError(
            f"-c {n_ctx} cannot hold the {needed} tokens of the longest prompt, generation and depth{of_requests}; "
            "raise it"
        )
    return setting_of(placer, n_ctx, options.n_ubatch or DEFAULT_UBATCH, options.n_batch or DEFAULT_BATCH)


def prepare(maker: ArmMaker, arms: Sequence[str], **options: Any) -> Bench:
    """Plan, search and fit: all decisions before the comparison. options: fields of Bench.

    Raises UsageError, DoesNotFit, and what planning, searching and fitting raise.
    """
    specs = [maker.make(name) for name in arms]
    specs += maker.at_the_plans_ubatch(specs)
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError("two arms have the same name; rename one of the plan files")
    placer, setting = maker.placer, maker.setting
    return Bench(
        arms=tuple(specs),
        tests=maker.tests,
        operators=placer.operators,
        n_layer=placer.model.n_layer,
        settings={
            "model_fingerprint": placer.model.fingerprint,
            "device": setting.load.device,
            "n_ctx": setting.load.n_ctx,
            "planned_for": asdict(maker.workload),
        },
        **options,
    )
