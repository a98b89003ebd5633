"""Fit a machine's few rates to runs of stock llama.cpp on a real card, and predict runs by the product's cost model.

    scripts/real_card fit TABLE.csv --models MODELS.toml -o MACHINE.json             # from a few of the rows
    scripts/real_card predict TABLE.csv --models MODELS.toml --machine MACHINE.json  # the others, with the errors

A TABLE has the columns Model, Context, NGL, Ubatch, PromptTokens, PromptTPS, EvalTokens, EvalTPS. MODELS.toml describes
each model by its sizes. docs/real-card.md says what came of it on an RTX 5090.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from card_model import (
    START,
    Machine,
    Predictor,
    PublishedRun,
    rates,
    read_machine,
    read_models,
    read_tables,
    with_rates,
    write_machine,
)
from shared import guarded, parser_of, write_document

from oallama.core.errors import UsageError
from oallama.planner.attention import ModelHeader

Vector = npt.NDArray[np.float64]
Row = dict[str, Any]
PHASES = ("prompt", "eval")

FITTED = (
    "host.bytes_per_s",
    "host.flops_attention_per_s",
    "host.flops_by_type.Q6_K",
    "card.bytes_per_s",
    "card.flops_per_s",
    "card.flops_float_per_s",
    "card.kernel_s",
    "card.pageable_bytes_per_s",
    "first_prompt_s",
)
"""The rates that many runs of stock llama.cpp at several depths tell. The others are constants of START: nothing in
such runs depends on the pinned link, and the small latencies cannot be told from card.kernel_s and card.copy_s."""

#
# the fit
#

TRUSTED = 0.15  # log ratio up to which a run counts fully (Huber)
STEP = 0.02  # of a factor's logarithm, for slopes
MAX_ROUNDS = 60
LEAST_GAIN = 1e-4  # of the loss; a round that gains less is the last
FURTHEST = 1.0  # that one round moves a factor's logarithm


def fit(runs: Sequence[PublishedRun], models: Mapping[str, ModelHeader], start: Machine) -> Machine:
    """The machine whose FITTED rates predict best what was measured. Levenberg-Marquardt over the logarithms of factors
    on them, so that no rate gets negative."""
    x = np.zeros(len(FITTED))
    begin = rates(start, FITTED)

    def machine(point: Vector) -> Machine:
        return with_rates(start, dict(zip(FITTED, np.array(list(begin.values())) * np.exp(point), strict=True)))

    def residuals(point: Vector) -> Vector:
        return misses(machine(point), runs, models)

    damping, now = 1e-2, residuals(x)
    for _ in range(MAX_ROUNDS):
        if loss(now) == 0:
            break
        slopes = np.column_stack([(residuals(x + step) - now) / STEP for step in STEP * np.eye(len(x))])
        weights = np.minimum(1.0, TRUSTED / np.maximum(np.abs(now), 1e-12))
        normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * now)
        gained = 0.0
        while damping < 1e6:
            scale = np.diag(np.diag(normal) + 1e-9)
            moved = x - np.clip(np.linalg.solve(normal + damping * scale, gradient), -FURTHEST, FURTHEST)
            then = residuals(moved)
            gained = 1 - loss(then) / loss(now)
            if gained > 0:
                x, now, damping = moved, then, damping / 4
                break
            damping *= 4
        if gained < LEAST_GAIN:
            break
    return replace(machine(x), notes=dict(start.notes))


def misses(machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, ModelHeader]) -> Vector:
    """Logarithms of predicted by measured."""
    predictor = Predictor(machine, models, runs)
    off: Vector = np.log([predictor(run, phase) / getattr(run, f"{phase}_tps") for run in runs for phase in PHASES])
    return off


def loss(off: Vector) -> float:
    """Huber's: squares up to TRUSTED, then straight on."""
    size = np.abs(off)
    return float(np.sum(np.where(size <= TRUSTED, size**2 / 2, TRUSTED * (size - TRUSTED / 2))))


#
# errors
#


def rows_of(machine: Machine, runs: Sequence[PublishedRun], models: Mapping[str, ModelHeader]) -> list[Row]:
    """List each run with its prediction."""
    predictor = Predictor(machine, models, runs)
    return [{**asdict(run), **{f"{phase}_tps_predicted": predictor(run, phase) for phase in PHASES}} for run in runs]


def error(row: Row, phase: str) -> float:
    """0.1: predicted a tenth faster than it was."""
    ratio: float = row[f"{phase}_tps_predicted"] / row[f"{phase}_tps"]
    return ratio - 1


def median_error(rows: Sequence[Row], phase: str) -> float:
    return median(abs(error(row, phase)) for row in rows)


def worst(rows: Sequence[Row], phase: str) -> Row:
    return max(rows, key=lambda row: abs(error(row, phase)))


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The record that --json prints."""
    far = {phase: worst(rows, phase) for phase in PHASES}
    which = ("model", "context", "ngl", "ubatch")
    return {
        "rows": list(rows),
        "median_error": {phase: median_error(rows, phase) for phase in PHASES},
        "worst_error": {p: {"error": error(row, p), **{key: row[key] for key in which}} for p, row in far.items()},
    }


def text(rows: Sequence[Row]) -> str:
    """Median error, lean and worst, a line for each model and context, prompt and generation apart."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']}, {row['context']}", []).append(row)
    lines = [f"{'model, context':24}{'runs':>6}" + "".join(f"   {phase:>6}: median  lean  worst" for phase in PHASES)]
    for name, group in [*sorted(groups.items()), ("all", list(rows))]:
        cells = (
            f"{median_error(group, phase):17.1%}{median(error(row, phase) for row in group):+7.1%}"
            f"{error(worst(group, phase), phase):+6.0%}" for phase in PHASES
        )  # fmt: skip
        lines.append(f"{name:24}{len(group):6}{''.join(cells)}")
    return "\n".join(lines)


#
# commands
#

CONTEXTS = (1024, 16384)
EVERY = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    return guarded("real_card", lambda: int(options.run(options)), "nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("real_card", __doc__)
    commands = parser.add_subparsers(required=True, metavar="fit|predict")

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str) -> Callable[..., argparse.Action]:
        subparser = commands.add_parser(name, help=what, description=what)
        subparser.set_defaults(run=run)
        subparser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
        subparser.add_argument("--models", type=Path, required=True, metavar="MODELS.toml")
        return subparser.add_argument

    pinned = START.card.pinned_bytes_per_s / 1e9
    add = command("fit", _fit, "fit the machine's rates to some of the rows")
    add("-o", "--output", type=Path, required=True, metavar="MACHINE.json")
    add("--name", default="card", help="name of the card")
    add("--pinned", type=float, default=pinned, metavar="GB/S",
        help="link rate from pinned memory, which these runs do not show (default: %(default)g)")  # fmt: skip
    add("--json", action="store_true", help="the other rows, as predict --json")
    add = command("predict", _predict, "predict the rows, and show the errors")
    add("--machine", type=Path, required=True, metavar="MACHINE.json")
    add("--json", action="store_true")
    return parser


def _read(options: argparse.Namespace) -> tuple[list[PublishedRun], dict[str, ModelHeader]]:
    runs, models = read_tables(options.tables), read_models(options.models)
    for run in runs:
        if run.model not in models:
            raise UsageError(f"{options.models} does not describe {run.model} of the tables")
        if run.ngl > models[run.model].model.n_layer + 1:
            raise UsageError(f"-ngl {run.ngl} exceeds the layers of {run.model}; check its sizes")
    return runs, models


def chosen(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Choose those of CONTEXTS with each EVERYth -ngl value of a model, context and micro-batch, from the largest down,
    so that all layers on the device is among them."""
    values: dict[tuple[str, int, int], set[int]] = {}
    for run in runs:
        values.setdefault((run.model, run.context, run.ubatch), set()).add(run.ngl)
    kept = {(*group, ngl) for group, ngls in values.items() for ngl in sorted(ngls, reverse=True)[::EVERY]}
    return [r for r in runs if r.context in CONTEXTS and (r.model, r.context, r.ubatch, r.ngl) in kept]


def _fit(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    used = chosen(runs)
    if 2 * len(used) < len(FITTED):
        raise UsageError(f"{len(used)} rows are too few to fit {len(FITTED)} rates")
    card = replace(START.card, name=options.name, description=f"{options.name}, fitted to runs of stock llama.cpp",
                   pinned_bytes_per_s=options.pinned * 1e9)  # fmt: skip
    notes = {"contexts": list(CONTEXTS), "every": EVERY, "rows": len(used), "of": len(runs)}
    machine = fit(used, models, replace(START, card=card, notes=notes))
    write_machine(machine, options.output)
    rows = rows_of(machine, used, models)
    if options.json:
        write_document(document(rows), None)
        return 0
    print(f"{len(used)} of {len(runs)} rows, {len(FITTED)} rates")
    for name, value in rates(machine, FITTED).items():
        print(f"  {name:30}{value:12.4g}")
    print("left: " + ", ".join(f"{phase} {median_error(rows, phase):.1%}" for phase in PHASES) + " in the median")
    return 0


def _predict(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    machine = read_machine(options.machine)
    used = set(chosen(runs)) if machine.notes else set()
    rows = [{**row, "fitted": run in used} for run, row in zip(runs, rows_of(machine, runs, models), strict=True)]
    if options.json:
        write_document(document(rows), None)
        return 0
    print(text(rows))
    others = [row for row in rows if not row["fitted"]]
    if others and len(others) < len(rows):
        print(f"\nThe {len(others)} rows not used for the fit:\n{text(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
