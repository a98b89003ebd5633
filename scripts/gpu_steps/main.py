"""The loop: choose a step that fits, run it, write what came of it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.child import ROOT
from experiments.command import guarded
from experiments.machine import backend_of
from experiments.models import Models, Shape
from experiments.results import DONE, FAILED, NAME, Results

from gpu_steps.kinds import StepSetting, run_step
from gpu_steps.scale import SCALES
from gpu_steps.schedule import choose, expected_seconds, pace_of
from gpu_steps.steps import GpuStep, steps_of

DEFAULT_BUDGET_S = 570.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_run", description="Measure on a GPU that is rented for minutes.")
    parser.add_argument("--device", default="CUDA0", help="as oallama's --device: CUDA0, Vulkan0, rpc-worker:1:1")
    parser.add_argument("--scale", choices=SCALES, default="lease", help="lease: three calls; small: a rehearsal")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, metavar="S", help="seconds of this call")
    parser.add_argument("--work", type=Path, metavar="DIR", help="models, caches, results (default build/gpu/…)")
    parser.add_argument("--out", type=Path, action="append", default=[], metavar="DIR", help="results are copied there")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results of an earlier call, from another machine")
    parser.add_argument("--threads", "-t", type=int, help="of the arms (default: the most of the scale that there are)")
    parser.add_argument("--cpus", default="", metavar="LIST", help="pin the arms to these CPUs")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only steps with TEXT in their name"
    )
    parser.add_argument(
        "--pack", type=Path, metavar="DIR", help="what scripts/build_cuda made (default: if it is there)"
    )
    parser.add_argument("--list", action="store_true", help="what is done, what is to do; run nothing")
    parser.add_argument("--report", action="store_true", help="write docs/gpu.md from docs/benchmarks/gpu-*.json")
    return parser.parse_args(arguments)


def work_folder(options: argparse.Namespace) -> Path:
    name = f"{backend_of(options.device).lower()}-{options.scale}"
    return options.work or ROOT / "build" / "gpu" / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done or out of time, 1 a step failed, 2 wrong usage, 130 interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background; children would inherit that
    begun = float(os.environ.get("OALLAMA_GPU_RUN_BEGAN", time.time()))  # before the pack was unpacked
    options = parse(arguments)
    if options.report:
        from gpu_steps.report import write_report

        return write_report(ROOT)
    return guarded("gpu_run", lambda: _run(options, begun))


def _run(options: argparse.Namespace, begun: float) -> int:
    """begun: on the clock of time.time. Raises InputError."""
    work = work_folder(options).absolute()
    identity = {"device": options.device, "scale": options.scale}
    copies = tuple(folder.absolute() for folder in options.out)
    results = Results(work / NAME, identity, copies, read_only=options.list)
    if options.resume:
        results.adopt(options.resume)
    from oallama.place.decide import POLICIES

    scale = SCALES[options.scale]
    n_cores = len(os.sched_getaffinity(0))
    steps = steps_of(scale, options.device, n_cores, tuple(POLICIES))
    steps = tuple(step for step in steps if not options.only or any(text in step.id for text in options.only))
    models = Models(work / "models", work / "log.txt", quick=True)
    if options.list:
        show(steps, results, models)
        return 0
    setting = StepSetting(
        options.device,
        options.threads or min(max(scale.threads), n_cores),
        options.cpus,
        work,
        work / "log.txt",
        json.loads(os.environ.get("OALLAMA_GPU_RUN_PACK", "{}")),
        lambda name: models.folder / f"{name}.gguf",
    )
    results.begin_call({"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)), "budget_s": options.budget,
                      "threads": setting.threads, "cpus": setting.cpus})  # fmt: skip
    return loop(steps, results, models, setting, begun + options.budget)


def loop(steps: Sequence[GpuStep], results: Results, models: Models, setting: StepSetting, deadline: float) -> int:
    """Until nothing that is left fits. deadline: on the clock of time.time."""
    bad: set[str] = set()
    shapes = tuple({shape.name: shape for step in steps for shape in step.models}.values())
    while True:
        choice = choose(steps, results.steps, deadline - time.time(), models.seconds(shapes), bad)
        step = choice.step
        if step is None:
            for name in choice.skipped:
                print(f"gpu_run: {name} is left out: what it needs failed", file=sys.stderr)
            if choice.waiting:
                print(f"gpu_run: left for another call: {', '.join(choice.waiting)}", file=sys.stderr)
            return int(bool(bad))
        if not run_one(step, results, models, setting, deadline, shapes):
            bad.add(step.id)


def run_one(
    step: GpuStep, results: Results, models: Models, setting: StepSetting, deadline: float, shapes: tuple[Shape, ...]
) -> bool:
    """Run a step and note what came of it; whether it is done."""
    tries = results.steps.get(step.id, {}).get("tries", 0) + 1
    print(f"gpu_run: {step.id}: {step.title}", file=sys.stderr, flush=True)
    noted = {"tries": tries, "title": step.title, "kind": step.kind}
    for shape in step.models:
        models.make_room(shape, step.models)
        if why := models.make(shape, deadline - time.time() - 2):
            results.put(step.id, state=FAILED, error=why, seconds=0.0, **noted)
            print(f"    {why}", file=sys.stderr)
            return False
    found = results.measured(step.id, lambda: run_step(step, setting, deadline - time.time() - 2, tries), **noted)
    print(f"    {found['error'] or 'done'} ({found['seconds']:.1f} s)", file=sys.stderr, flush=True)
    return bool(found["state"] == DONE)


def show(steps: Sequence[GpuStep], results: Results, models: Models) -> None:
    """One line a step: what is known of it, and how long it took or is thought to take."""
    pace = pace_of(steps, results.steps)
    total = 0.0
    for step in steps:
        result = results.steps.get(step.id, {})
        expected = expected_seconds(step, result, pace) + sum(models.seconds(step.models).values())
        if result.get("state") == DONE:
            print(f"{'done':8}{result['seconds']:7.0f} s  {step.id}: {step.title}")
        else:
            total += expected
            print(f"{result.get('state', 'to do'):8}{expected:6.0f}~ s  {step.id}: {step.title}")
    print(f"about {total:.0f} s to go", file=sys.stderr)
