"""Predict runs of stock llama.cpp on a real card, whose few rates are known, by the product's cost model.

    scripts/real_card predict TABLE.csv --models MODELS.toml --machine MACHINE.json

A TABLE has the columns Model, Context, NGL, Ubatch, PromptTokens, PromptTPS, EvalTokens, EvalTPS, and may have MVA, the
budget in MB; it may also be what `predict --json` wrote. MODELS.toml describes each model by its sizes.
docs/real-card.md says what came of it on an RTX 5090.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.command import guarded, parser_of
from experiments.inputs import InputError

from card_fit.errors import document, rows_of, text
from card_fit.machine import Machine, read_machine
from card_fit.models import Model, read_models
from card_fit.plot import write_plot
from card_fit.predict import Predictor
from card_fit.tables import Run, read_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input, 130 interrupted."""
    parser = parser_of("real_card", __doc__)
    commands = parser.add_subparsers(required=True, metavar="predict")
    predict = commands.add_parser("predict", help="predict the rows, and say how far off that is")
    predict.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    predict.add_argument("--models", type=Path, required=True, metavar="MODELS.toml")
    predict.add_argument("--machine", type=Path, required=True, metavar="MACHINE.json")
    predict.add_argument("--json", action="store_true")
    predict.add_argument("--plot", type=Path, metavar="FILE.svg", help="predicted against measured")
    options = parser.parse_args(arguments)
    return guarded("real_card", lambda: _predict(options), "nothing was written")


def _read(options: argparse.Namespace) -> tuple[list[Run], dict[str, Model]]:
    runs, models = read_tables(options.tables), read_models(options.models)
    for run in runs:
        if run.model not in models:
            raise InputError(f"{options.models} does not describe {run.model}, which the tables have")
        if run.ngl > models[run.model].info.n_layer + 1:
            raise InputError(f"-ngl {run.ngl} is more than {run.model} has layers; are its sizes right?")
    return runs, models


def chosen(runs: Sequence[Run], contexts: Sequence[int], every: int) -> list[Run]:
    """Of each model, context and micro-batch every Nth -ngl value, counted from the largest: all layers on the device
    is among them."""
    values: dict[tuple[str, int, int], set[int]] = {}
    for run in runs:
        values.setdefault((run.model, run.context, run.ubatch), set()).add(run.ngl)
    kept = {(*group, ngl) for group, of in values.items() for ngl in sorted(of, reverse=True)[::every]}
    return [r for r in runs if r.context in contexts and (r.model, r.context, r.ubatch, r.ngl) in kept]


def _predict(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    machine = read_machine(options.machine)
    rows = rows_of(Predictor(machine, models, runs), runs, _was_fitted(machine, runs))
    if options.plot:
        write_plot(rows, options.plot)
    if options.json:
        print(json.dumps(document(rows), indent=1))
        return 0
    print(text(rows), end="")
    others = [row for row in rows if not row["fitted"]]
    if others and len(others) < len(rows):
        print(f"\nThe {len(others)} rows that nothing was fitted to:\n{text(others)}", end="")
    return 0


def _was_fitted(machine: Machine, runs: Sequence[Run]) -> Callable[[Run], bool]:
    notes = machine.notes
    used = {run.config for run in chosen(runs, notes.get("contexts", ()), notes.get("every", 1))}
    return lambda run: run.config in used
