"""What plans for one depth of context lose at others, and what moving their cuts alone would gain there: predicted."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from measure.measure import Measure, Step, name_of
from oallama import Placer
from oallama.core.types import Workload
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.passes import Pass
from oallama.cost.timeline import cycle_seconds
from oallama.device.machines import machine_of
from oallama.place.cuts import Layers, best_cg
from oallama.place.placed import Placed
from oallama.place.problem import Problem
from oallama.place.record import placed_by_plan
from oallama.place.simulate import simulate
from oallama.place.slicer import MODEL_ROUNDS, Slicer
from oallama.placer.described import plan_for, problem_on

MESSAGE = 512  # tokens: the least depth that is looked at
N_PROMPT = 2  # of a workload that is all generation


def at_depth(depth: int, n_ctx: int) -> Workload:
    """Generation of which the mean token sees so many others, in a cache for n_ctx."""
    return Workload(N_PROMPT, 2 * (depth - N_PROMPT), n_ctx)


def _steps(options: argparse.Namespace) -> Iterator[Step]:
    for path in options.files:
        for n_ctx in map(int, options.contexts.split(",")):
            for vram in options.vram.split(","):
                placer = Placer.load(path, device="none", vram=vram, n_ctx=n_ctx, flash_attn="on")
                for machine in options.machines.split(","):
                    step = f"{name_of(path)}, {machine}, {vram}, context {n_ctx}"
                    yield Step(step, path, partial(_priced, placer, machine, n_ctx))


def _priced(placer: Placer, machine: str, n_ctx: int) -> dict[str, Any]:
    """Of the plans for each depth, seconds of a token at each: as they are, and with cuts that are best there."""
    on = machine_of(machine)
    problem = problem_on(placer, on)
    depths = (MESSAGE, n_ctx // 2, n_ctx)
    plans = []
    for depth in depths:
        record = plan_for(placer, on, at_depth(depth, n_ctx))
        placed = placed_by_plan(placer.model.n_layer, placer.operators, record)
        plans.append({
            "policy": record.policy, "depth": depth, "kv_layers": max(0, record.n_gpu_layers - 1),
            "streamed": 0 if placed.slices is None else sum(map(bool, placed.slices.cg)),
            "seconds": [simulate(problem, at_depth(d, n_ctx), placed).predicted.tpot_s for d in depths],
            "moved_s": [moved_seconds(problem, placed, at_depth(d, n_ctx)) for d in depths],
        })  # fmt: skip
    return {"depths": depths, "plans": plans}


def moved_seconds(problem: Problem, placed: Placed, load: Workload) -> float | None:
    """Of a token where each block is cut into CC and CG anew beside the same GG, all else staying where it is. None
    where nothing may be streamed."""
    if placed.slices is None or placed.slices.settings is None:
        return None
    settings = placed.slices.settings
    slicer = Slicer(problem, load, settings)
    layers, table = slicer.cuts_of(placed), placed.slices.token_assignment
    known: dict[object, Cut] = {}

    def best(of: BlockCost, cut: Cut) -> Cut:
        if cut.n_hot:
            return cut
        key = (of.same, cut.gg)
        if key not in known:
            known[key] = best_cg(of, cut.gg, lambda one: slicer.on.seconds(of, one, 1))[0]
        return known[key]

    def seconds(layers: Layers) -> float:
        times = slicer.pass_times(layers, table, Pass(1, load.n_prompt, 1))
        return cycle_seconds(times, slicer.on.streaming, MODEL_ROUNDS)

    return min(seconds(layers), seconds([(of, best(of, cut)) for of, cut in layers]))


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for step, data in found:
        plans = data["plans"]
        best = [min(times) for times in zip(*(plan["seconds"] for plan in plans), strict=True)]

        def lost(plan: Any, best: Sequence[float] = best) -> str:
            return ", ".join(f"{s / b - 1:.0%}" for s, b in zip(plan["seconds"], best, strict=True))

        def gained(plan: Any) -> str:
            pairs = zip(plan["seconds"], plan["moved_s"], strict=True)
            return ", ".join("-" if moved is None else f"{1 - moved / s:.0%}" for s, moved in pairs)

        rows.append((
            step, ", ".join(f"{1e3 * s:.1f}" for s in best), *map(lost, plans), *map(gained, plans),
            ", ".join(str(plan["kv_layers"]) for plan in plans),
        ))  # fmt: skip
    return rows


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="MODEL", help="headers are enough (make_model.py --empty)")
    parser.add_argument("--machines", default="pc-12gb,pc-24gb", help="described ones (default: pc-12gb,pc-24gb)")
    parser.add_argument("--vram", default="3GiB,4GiB,6GiB", help="(default: 3GiB,4GiB,6GiB)")
    parser.add_argument("--contexts", default="4096,16384,32768", help="(default: 4096,16384,32768)")


MEASURE = Measure(
    "what plans for one depth of context are predicted to lose at others: `auto` for 512 tokens, half of the context "
    "and all of it, each priced at all three", _add_options, _steps,
    ("model, machine, memory", "ms a token", "plan for 512 loses", "for half", "for all",
     "moved cuts gain for 512", "for half", "for all", "layers with KV on the device"),
    _rows,
)  # fmt: skip
