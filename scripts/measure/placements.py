"""Predicted against measured TTFT and TPOT of random placements of whole operators."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from experiments.generation import generations, lasting_prompt

from measure.measure import Measure, MeasureStep, add_common, column
from oallama import Placer

FIGURES = ("ttft_s", "tpot_s", "total_s")


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    """Random -ngl, and a random share of the operators of these layers."""
    (path,), (threads,) = options.files, options.threads
    placer = Placer.load(path, device=options.device, threads=threads)
    rng, n_layer = random.Random(options.seed), placer.model.n_layer
    for i in range(options.placements):
        gpu_layers = rng.choice((n_layer + 1, rng.randint(1, n_layer + 1)))
        share, first = rng.random(), n_layer + 1 - gpu_layers
        chosen = [
            op.name
            for op in placer.operators
            if (n_layer if op.layer is None else op.layer) >= first and rng.random() < share
        ]
        yield MeasureStep(f"placement {i}", path, partial(_measure, placer, gpu_layers, chosen, options))


def _measure(placer: Placer, gpu_layers: int, chosen: list[str], options: argparse.Namespace) -> dict[str, Any]:
    plan = placer.plan_of(chosen, gpu_layers, placer.workload(options.n_prompt, options.n_gen))
    with placer.engine(plan) as engine:
        prompt = lasting_prompt(engine, options.n_prompt, options.n_gen)
        samples = generations(engine, prompt, options.n_gen, options.rounds)
    measured = {key: median(column(samples, key)) for key in ("ttft_s", "tpot_s")}
    measured["total_s"] = measured["ttft_s"] + options.n_gen * measured["tpot_s"]
    return {
        "gpu_layers": gpu_layers, "operators": chosen, "samples": samples,
        **{key: {"predicted": getattr(plan.predicted, key), "measured": value} for key, value in measured.items()},
    }  # fmt: skip


def error(row: dict[str, Any], key: str) -> float:
    """0.1: predicted a tenth more than it took."""
    return float(row[key]["predicted"] / row[key]["measured"] - 1)


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    def cells(data: Any) -> list[str]:
        return [f"{data([error(row, key) for _, row in found]):.1%}" for key in FIGURES]

    each = [(step, len(row["operators"]), *(f"{error(row, key):+.1%}" for key in FIGURES)) for step, row in found]
    return [
        *each,
        ("median error", "", *cells(lambda errors: median(map(abs, errors)))),
        ("worst error", "", *cells(lambda errors: max(map(abs, errors)))),
    ]


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--placements", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)


MEASURE = Measure(
    "predicted against measured times of random placements", _add_options, _steps,
    ("placement", "operators there", "TTFT", "TPOT", "whole run"), _rows,
)  # fmt: skip
