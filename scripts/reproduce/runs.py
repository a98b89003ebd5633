"""Every pair of cell and arm that the figures need, planned and simulated once, on all cores."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from oallama.core.errors import DoesNotFit
from oallama.place.decide import Rules, decide
from oallama.place.placed import Placed
from oallama.place.simulate import simulate
from oallama.place.sliced import QUICK, THOROUGH
from reproduce.figures import Figure, FigureArm, FigureCell
from reproduce.settings import problem, workload

Key = tuple[FigureCell, FigureArm]

SLICED = ("scheinfer", "split", "auto")
"""Policies whose plans are searched in the quick way: one takes seconds instead of a minute."""


@dataclass(frozen=True)
class ArmPrediction:
    """What the simulator says of an arm in a cell."""

    ttft_s: float
    tpot_s: float
    total_s: float
    device_bytes: int  # of weights, whole and sliced
    n_ubatch: int

    def seconds(self, metric: str) -> float:
        return float(getattr(self, f"{metric}_s"))


def needed(figures: Iterable[Figure]) -> list[Key]:
    """In the order in which the figures ask for them."""
    keys: dict[Key, None] = {}
    for figure in figures:
        for cell in figure.cells:
            for arm in (figure.ours, figure.baseline, figure.variant):
                if arm is not None:
                    keys[cell, arm] = None
    return list(keys)


def run(key: Key) -> ArmPrediction | None:
    """None where the arm's plan does not fit."""
    cell, arm = key
    asked, load = problem(cell, arm), workload(cell)
    effort = QUICK if arm.policy in SLICED else THOROUGH
    try:
        made = decide(asked, arm.policy, load, "mixed", Rules(arm.affinity, arm.fill, arm.prefetch), effort)  # type: ignore[arg-type]
    except DoesNotFit:
        return None
    found = simulate(asked, made.workload, made.placed, None if arm.offload else False).predicted
    taken = _device_bytes([operator.bytes for operator in asked.operators], made.placed)
    return ArmPrediction(found.ttft_s, found.tpot_s, found.total_s, taken, made.workload.n_ubatch)


def _device_bytes(sizes: list[int], placed: Placed) -> int:
    whole = sum(size for size, there in zip(sizes, placed.on_device, strict=True) if there)
    return whole + (placed.slices.weights_bytes if placed.slices else 0)


def run_all(keys: list[Key], jobs: int | None = None) -> dict[Key, ArmPrediction | None]:
    """All of them, the longest first; progress on stderr."""
    found: dict[Key, ArmPrediction | None] = {}
    start = time.monotonic()
    order = sorted(keys, key=lambda key: key[1].policy not in SLICED)
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        waiting = {pool.submit(run, key): key for key in order}
        for done in as_completed(waiting):
            cell, arm = waiting[done]
            found[cell, arm] = done.result()
            print(f"{len(found)} of {len(keys)}, {time.monotonic() - start:.0f} s: {cell.machine} {cell.model} "
                  f"{arm.policy}", file=sys.stderr, flush=True)  # fmt: skip
    return found
