"""Re-planning while another program takes half of the CPU: tokens/s before, meanwhile, after; with it and without."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from experiments.generation import prompt_of

from measure.measure import Measure, MeasureStep, add_common, name_of
from oallama import Placer, Plan
from oallama.core.units import format_bytes
from oallama.run.engine import Engine
from oallama.run.replan import TOKENS_BETWEEN

PHASES = ("before", "meanwhile", "after")
SPIN = "while True: pass"
AT_ONCE = 8  # tokens


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "emulated:rtx3060-12", n_gen=96, rounds=3)  # tokens: of each phase
    parser.add_argument("--vram", help="of the device, as oallama's --vram")
    parser.add_argument("--vram-fill", type=float, default=0.9, help="as oallama's --vram-fill (default: 0.9)")
    parser.add_argument("--policy", default="scheinfer")


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    for path in options.files:
        yield MeasureStep(name_of(path), path, partial(_measure, path, options))


def _measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    placer = Placer.load(
        path, device=options.device, vram=options.vram, vram_fill=options.vram_fill, threads=options.threads[0]
    )
    plan = placer.plan(options.policy, n_prompt=options.n_prompt, n_gen=3 * options.n_gen)
    kept = placer.kept_cuts(plan)
    if kept is None or not kept.moves:
        raise SystemExit(f"{path}: the plan slices nothing of which other cuts could be kept")
    rounds = []
    for _ in range(options.rounds):
        rounds.append(
            {arm: _round(placer, plan, kept if arm == "with" else None, options) for arm in ("without", "with")}
        )
    return {
        "device": str(placer.device),
        "threads": placer.threads,
        "twice_bytes": kept.twice_bytes,
        "staging_bytes": kept.staging_bytes,
        "notes": list(kept.notes),
        "cuts": [[[cut.cc, cut.cg, cut.gg] for cut in one.cuts] for one in kept.blocks],
        "rounds": rounds,
    }


def _round(placer: Placer, plan: Plan, kept: Any, options: argparse.Namespace) -> dict[str, Any]:
    """One load: seconds of each token in each phase, and what was changed."""
    with placer.engine(plan, progress=False, replan=kept) as engine:
        prompt = prompt_of(options.n_prompt, placer.model.n_vocab)
        token_seconds(engine, prompt, 2 * TOKENS_BETWEEN)  # warm
        seconds = {"before": token_seconds(engine, prompt, options.n_gen)}
        with _half_of_the_cpu(placer):
            seconds["meanwhile"] = token_seconds(engine, prompt, options.n_gen)
        seconds["after"] = token_seconds(engine, prompt, options.n_gen)
        return {"seconds": seconds, "replanned": list(engine.replanned), "statistics_s": _cost(engine)}


def token_seconds(engine: Engine, prompt: list[int], n_gen: int) -> list[float]:
    """Seconds of tokens, the mean of some at a time. By tokens, not by pieces of text: those of models that were made
    here have none. Another draw follows where the model would end."""
    times: list[float] = []
    for seed in count():
        if len(times) >= n_gen:
            break
        made = engine.generate(prompt, max_tokens=AT_ONCE + 1, temperature=0.8, seed=seed)
        times += [made.tpot_s] * (made.n_gen - 1)
    return times[:n_gen]


def _cost(engine: Engine) -> float:
    """Seconds that noting and looking at the times take for each token; 0 without re-planning."""
    running = engine._replan
    if running is None:
        return 0.0
    n, start = 10 * TOKENS_BETWEEN, time.perf_counter()
    for _ in range(n):
        running.beat(64)
    return (time.perf_counter() - start) / n


@contextmanager
def _half_of_the_cpu(placer: Placer) -> Iterator[None]:
    """On each core that CC is computed on, a program that computes all the time."""
    emulated = placer.device.emulated
    cores = sorted(os.sched_getaffinity(0) - ({emulated.cpus} if emulated is not None else set()))[: placer.threads]
    others = [subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{SPIN}"])
              for core in cores]  # fmt: skip
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for name, data in found:
        for arm in ("without", "with"):
            per_phase = []
            for phase in PHASES:
                of_rounds = [one[arm]["seconds"][phase] for one in data["rounds"]]
                settled = [s for seconds in of_rounds for s in seconds[len(seconds) // 2 :]]  # whatever was changed
                per_phase.append(f"{1 / median(settled):.1f}")
            changes = sum(len(one[arm]["replanned"]) for one in data["rounds"]) / len(data["rounds"])
            cost_s = max(one[arm]["statistics_s"] for one in data["rounds"])
            kept = format_bytes(data["twice_bytes"]) if arm == "with" else ""
            rows.append((name, arm, *per_phase, f"{changes:.1f}", f"{cost_s * 1e6:.0f}", kept))
    return rows


MEASURE = Measure(
    "re-planning while another program takes half of the CPU. Close other programs. Needs a device, such "
    "as the emulated one.", _add_options, _steps,
    ("model", "re-planning", *(f"tokens/s {phase}" for phase in PHASES), "changes a round", "µs a token", "kept twice"),
    _rows,
)  # fmt: skip
