"""From what was asked for to a Bench: tests, the setting that all arms share, the cap, and the arms themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oallama.bench.ab import Bench, Progress, quiet
from oallama.bench.arms import STOCK_ARGS, STOCK_CPU, STOCK_FIT, ArmMaker, memory_cap
from oallama.bench.records import BenchTest, Setting
from oallama.core.errors import UsageError
from oallama.placer import Placer

CONTEXT_STEP = 256  # llama.cpp pads the KV cache to it


def bench_tests(
    n_prompt: Sequence[int], n_gen: Sequence[int], pairs: Sequence[tuple[int, int]], n_depth: Sequence[int]
) -> tuple[BenchTest, ...]:
    """Every combination, as llama-bench makes them; a count of 0 is none. Raises UsageError where nothing is left."""
    shapes = [*((n, 0) for n in n_prompt if n), *((0, n) for n in n_gen if n), *pairs]
    tests = tuple(dict.fromkeys(BenchTest(p, g, depth) for depth in n_depth for p, g in shapes))
    if not tests:
        raise UsageError("there is nothing to time; give -p, -n or -pg a count above 0")
    return tests


def shared_setting(
    placer: Placer, tests: Sequence[BenchTest], n_ctx: int | None = None, cpus: tuple[int, ...] = (), **options: Any
) -> Setting:
    """What all arms share; options: fields of Setting. The context is n_ctx, or holds the longest prompt, generation
    and depth of the tests together, for which plans are made.

    Raises UsageError for an n_ctx that is too short, and for cpus that the device needs.
    """
    needed = sum(max(count) for count in zip(*((t.n_prompt, t.n_gen, t.n_depth) for t in tests), strict=True))
    n_ctx = n_ctx or -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    if n_ctx < needed:
        raise UsageError(
            f"-c {n_ctx} cannot hold the {needed} tokens of the longest prompt, generation and depth; raise it"
        )
    emulated = placer.device.emulated
    if emulated is not None and emulated.cpus in cpus:
        raise UsageError(f"--cpus: the emulated device keeps core {emulated.cpus} for itself; leave it out")
    return Setting(
        model=placer.model.path,
        device=str(placer.device.timed) if placer.has_device else "none",
        n_ctx=n_ctx,
        n_threads=placer.threads,
        cpus=cpus,
        **options,
    )


def default_arms(placer: Placer) -> tuple[str, str]:
    """The strongest stock arm there is without searching, and ours."""
    return (STOCK_FIT if can_place(placer) else STOCK_CPU, "auto")


def can_place(placer: Placer) -> bool:
    """Whether stock llama.cpp has a device here to place layers on."""
    return placer.device.kind != "cpu-pair" and placer.has_device


def prepare(
    placer: Placer,
    tests: tuple[BenchTest, ...],
    setting: Setting,
    arms: Sequence[str],
    stock_args: Sequence[str] = (),
    plan_options: dict[str, Any] | None = None,
    progress: Progress = quiet,
    gate: bool = True,
    refresh_gate: bool = False,
    **options: Any,
) -> Bench:
    """Plan, search and fit: everything that is decided before arms are compared. gate: `auto` passes the gate first;
    refresh_gate: even where its verdict is remembered. options: fields of Bench.

    Raises UsageError, DoesNotFit, and what planning, searching and fitting raise.
    """
    cap = memory_cap(placer, setting)
    maker = ArmMaker(placer, setting, cap, tests, plan_options or {}, progress, gate, refresh_gate)
    specs = [maker.make(name) for name in arms]
    for index, text in enumerate(stock_args):
        specs.append(maker.make_of_args(f"{STOCK_ARGS}-{index + 1}" if index else STOCK_ARGS, text))
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError("two arms have the same name; rename one of the plan files")
    return Bench(
        arms=tuple(specs),
        tests=tests,
        operators=placer.operators,
        n_layer=placer.model.n_layer,
        cap=cap,
        settings={
            "model_fingerprint": placer.model.fingerprint,
            "device": setting.device,
            "n_ctx": setting.n_ctx,
            "seed": setting.seed,
            "cpus": list(setting.cpus),
            "planned_for": maker.workload,
        },
        **options,
    )
