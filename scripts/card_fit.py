"""Fit a machine's few rates to runs of stock llama.cpp on a real card, and predict runs by the product's cost model.

    scripts/real_card fit TABLE.csv --models MODELS.toml -o MACHINE.json             # from a few of the rows
    scripts/real_card predict TABLE.csv --models MODELS.toml --machine MACHINE.json  # the others, with the errors
    scripts/real_card machines TABLE.csv                    # many machines with few rows each: writes docs/real-card.md

A TABLE has the columns Model, Context, NGL, Ubatch, PromptTokens, PromptTPS, EvalTokens, EvalTPS, and may have MVA, the
budget in MB. MODELS.toml describes each model by its sizes.
docs/real-card.md says what came of it on an RTX 5090; the table of `machines` is described in card_machines.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from card_machines import Panels, write_machines
from card_model import (
    FITTED,
    START,
    CardModel,
    FittedMachine,
    Predictor,
    PublishedRun,
    rates,
    read_machine,
    read_models,
    read_tables,
    with_rates,
    write_machine,
)
from shared import InputError, guarded, parser_of, write_document

#
# the fit
#

Vector = npt.NDArray[np.float64]
Row = dict[str, Any]
PHASES = ("prompt", "eval")

TRUSTED = 0.15  # log ratio up to which a run counts fully (Huber)
STEP = 0.02  # of a parameter's logarithm, for slopes
MAX_ROUNDS = 60
LEAST_GAIN = 1e-4  # of the loss; a round that gains less is the last
FURTHEST = 1.0  # that one round moves a parameter's logarithm


def fit(
    runs: Sequence[PublishedRun],
    models: Mapping[str, CardModel],
    start: FittedMachine = START,
    names: Sequence[str] = FITTED,
    phases: Sequence[str] = PHASES,
) -> FittedMachine:
    """The machine that predicts what was measured of these phases best. Rates are fitted as logarithms, so that none
    gets negative. names: of the rates that are."""
    x = np.log([rates(start, names)[name] for name in names])

    def machine(point: Vector) -> FittedMachine:
        return with_rates(start, dict(zip(names, np.exp(point).tolist(), strict=True)))

    def residuals(point: Vector) -> Vector:
        rows = rows_of(Predictor(machine(point), models, runs), runs)
        off: Vector = np.log([1 + error(row, phase) for row in rows for phase in phases if row[f"{phase}_tps"]])
        return off

    damping, now = 1e-2, residuals(x)
    for _ in range(MAX_ROUNDS):
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


def loss(off: Vector) -> float:
    """Huber's: squares up to TRUSTED, then straight on."""
    size = np.abs(off)
    return float(np.sum(np.where(size <= TRUSTED, size**2 / 2, TRUSTED * (size - TRUSTED / 2))))


#
# errors
#


def rows_of(
    predictor: Predictor, runs: Sequence[PublishedRun], fitted: Callable[[PublishedRun], bool] | None = None
) -> list[Row]:
    """Every run with what is predicted of it. fitted: whether the machine's rates are from it."""
    made = []
    for run in runs:
        out = predictor(run)
        row = {**run.told(), "prompt_tps_predicted": out.prompt_tps, "eval_tps_predicted": out.eval_tps}
        made.append(row if fitted is None else {**row, "fitted": fitted(run)})
    return made


def error(row: Row, phase: str) -> float:
    """0.1: predicted a tenth faster than it was."""
    ratio: float = row[f"{phase}_tps_predicted"] / row[f"{phase}_tps"]
    return ratio - 1


def median_error(rows: Sequence[Row], phase: str) -> float:
    return median(abs(error(row, phase)) for row in rows)


def worst(rows: Sequence[Row], phase: str) -> Row:
    return max(rows, key=lambda row: abs(error(row, phase)))


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The contract's record."""
    return {
        "rows": list(rows),
        "median_error": {phase: median_error(rows, phase) for phase in PHASES},
        "worst_error": {phase: {"error": error(row := worst(rows, phase), phase), **_which(row)} for phase in PHASES},
    }


def _which(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("model", "context", "ngl", "ubatch")}


def text(rows: Sequence[Row]) -> str:
    """Median, lean and worst by model and context, prompt and generation apart."""
    heads = "   ".join(["  median    lean   worst  at -ngl"] * 2)
    lines = [
        f"{'':34}{'prompt, tokens/s':^33}   {'generation, tokens/s':^33}",
        f"{'model':16}{'context':>8}{'runs':>6}    {heads}",
    ]
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["context"]), []).append(row)
    for (model, context), group in sorted(groups.items()):
        lines.append(f"{model:16}{context:8}{len(group):6}    {_cells(group)}")
    lines.append(f"{'all':16}{'':8}{len(rows):6}    {_cells(rows)}")
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> str:
    cells = []
    for phase in PHASES:
        worst_row = worst(rows, phase)
        lean = median(error(row, phase) for row in rows)
        cells.append(f"{median_error(rows, phase):8.1%}{lean:+8.1%}{error(worst_row, phase):+8.1%}{worst_row['ngl']:9}")
    return "   ".join(cells)


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
    commands = parser.add_subparsers(required=True, metavar="fit|predict|machines")

    def command(name: str, run: Callable[[argparse.Namespace], int], what: str) -> Callable[..., argparse.Action]:
        made = commands.add_parser(name, help=what, description=what)
        made.set_defaults(run=run)
        made.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
        made.add_argument("--models", type=Path, required=True, metavar="MODELS.toml")
        return made.add_argument

    pinned = START.card.pinned_bytes_per_s / 1e9
    add = command("fit", _fit, "find the machine's rates from some of the rows")
    add("-o", "--output", type=Path, required=True, metavar="MACHINE.json")
    add("--name", default="card", help="what the card is called")
    add("--memory", type=float, default=32, metavar="GIB", help="of the card (default: 32)")
    add("--pinned", type=float, default=pinned, metavar="GB/S",
        help="of the link from pinned memory, which these runs do not show (default: %(default)g)")  # fmt: skip
    add("--contexts", type=_numbers, default=CONTEXTS, metavar="N,…", help="fit to rows of these (default: 1024,16384)")
    add("--every", type=_above_0, default=EVERY, metavar="N", help="and of these each Nth -ngl value (default: 3)")
    add("--json", action="store_true", help="what is left of these rows, as predict --json")
    add = command("predict", _predict, "predict the rows, and say how far off that is")
    add("--machine", type=Path, required=True, metavar="MACHINE.json")
    add("--json", action="store_true")
    add("--picture", type=Path, metavar="FILE.svg", help="measured and predicted, by model and context")
    made = commands.add_parser("machines", help="predict and draw many machines, and write docs/real-card.md")
    made.set_defaults(run=lambda options: write_machines(options.table, fit))
    made.add_argument("table", type=Path, nargs="?", metavar="TABLE.csv", help="without one only the page is written")
    return parser


def _numbers(text_of: str) -> tuple[int, ...]:
    return tuple(_above_0(part) for part in text_of.split(","))


def _above_0(text_of: str) -> int:
    try:
        value = int(text_of)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text_of!r} is no number above 0")
    return value


def _read(options: argparse.Namespace) -> tuple[list[PublishedRun], dict[str, CardModel]]:
    runs, models = read_tables(options.tables), read_models(options.models)
    for run in runs:
        if run.model not in models:
            raise InputError(f"{options.models} does not describe {run.model}, which the tables have")
        if run.ngl > models[run.model].info.n_layer + 1:
            raise InputError(f"-ngl {run.ngl} is more than {run.model} has layers; are its sizes right?")
    return runs, models


def chosen(runs: Sequence[PublishedRun], contexts: Sequence[int], every: int) -> list[PublishedRun]:
    """Of each model, context and micro-batch every Nth -ngl value, counted from the largest: all layers on the device
    is among them."""
    values: dict[tuple[str, int, int], set[int]] = {}
    for run in runs:
        values.setdefault((run.model, run.context, run.ubatch), set()).add(run.ngl)
    kept = {(*group, ngl) for group, ngls in values.items() for ngl in sorted(ngls, reverse=True)[::every]}
    return [r for r in runs if r.context in contexts and (r.model, r.context, r.ubatch, r.ngl) in kept]


def _fit(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    used = chosen(runs, options.contexts, options.every)
    if 2 * len(used) < len(FITTED):
        raise InputError(f"{len(used)} rows are too few to fit {len(FITTED)} rates to; see --contexts and --every")
    card = replace(START.card, name=options.name, description=f"{options.name}, fitted to runs of stock llama.cpp",
                   memory_bytes=int(options.memory * 2**30), pinned_bytes_per_s=options.pinned * 1e9)  # fmt: skip
    notes = {"contexts": list(options.contexts), "every": options.every, "rows": len(used), "of": len(runs)}
    machine = fit(used, models, replace(START, card=card, notes=notes))
    write_machine(machine, options.output)
    rows = rows_of(Predictor(machine, models, runs), used)
    if options.json:
        write_document(document(rows), None)
        return 0
    print(f"{len(used)} of {len(runs)} rows, {len(FITTED)} rates")
    for name, value in rates(machine).items():
        print(f"  {name:30}{value:12.4g}")
    print("left: " + ", ".join(f"{phase} {median_error(rows, phase):.1%}" for phase in PHASES) + " in the median")
    return 0


def _predict(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    machine = read_machine(options.machine)
    rows = rows_of(Predictor(machine, models, runs), runs, _was_fitted(machine, runs))
    if options.picture:
        groups: dict[str, Row] = {}
        for row in rows:
            group = groups.setdefault(f"{row['model']}, {row['context'] // 1024} K", {"name": "", "points": []})
            group["points"] += [
                {"phase": phase, "measured": row[f"{phase}_tps"], "predicted": row[f"{phase}_tps_predicted"],
                 "fitted": row["fitted"]} for phase in PHASES
            ]  # fmt: skip
        options.picture.write_text(
            Panels("Measured and predicted tokens per second, by context", groups).svg(), "utf-8"
        )
    if options.json:
        write_document(document(rows), None)
        return 0
    print(text(rows))
    others = [row for row in rows if not row["fitted"]]
    if others and len(others) < len(rows):
        print(f"\nThe {len(others)} rows that nothing was fitted to:\n{text(others)}")
    return 0


def _was_fitted(machine: FittedMachine, runs: Sequence[PublishedRun]) -> Callable[[PublishedRun], bool]:
    notes = machine.notes
    used = {run.config for run in chosen(runs, notes.get("contexts", ()), notes.get("every", 1))}
    return lambda run: run.config in used
