"""Fit a machine's few rates to runs of stock llama.cpp on a real card, and predict runs by the product's cost model.

    scripts/real_card fit TABLE.csv --models MODELS.toml -o MACHINE.json             # from a few of the rows
    scripts/real_card predict TABLE.csv --models MODELS.toml --machine MACHINE.json  # the others, with the errors
    scripts/real_card terms TABLE.csv --models MODELS.toml --machine MACHINE.json    # what each term is worth

A TABLE has the columns Model, Context, NGL, Ubatch, PromptTokens, PromptTPS, EvalTokens, EvalTPS, and may have MVA, the
budget in MB; it may also be what `predict --json` wrote. MODELS.toml describes each model by its sizes.
docs/real-card.md says what came of it on an RTX 5090.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.command import guarded, parser_of, write_document
from experiments.inputs import InputError

from card_fit.errors import PHASES, document, median_error, rows_of, text
from card_fit.fit import fit
from card_fit.machine import FITTED, START, FittedMachine, rates, read_machine, write_machine
from card_fit.models import CardModel, read_models
from card_fit.plot import write_plot
from card_fit.predict import Predictor
from card_fit.tables import PublishedRun, read_tables
from card_fit.terms import effects, noise
from card_fit.terms import text as terms_text

CONTEXTS = (1024, 16384)
EVERY = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    return guarded("real_card", lambda: int(options.run(options)), "nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("real_card", __doc__)
    commands = parser.add_subparsers(required=True, metavar="fit|predict|terms")

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
    add("--plot", type=Path, metavar="FILE.svg", help="predicted against measured")
    add = command("terms", _terms, "switch off each term of the cost model, and say how far off predictions are then")
    add("--machine", type=Path, required=True, metavar="MACHINE.json")
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
    if options.plot:
        write_plot(rows, options.plot)
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


def _terms(options: argparse.Namespace) -> int:
    runs, models = _read(options)
    machine = read_machine(options.machine)
    was_fitted = _was_fitted(machine, runs)
    fitted = [run for run in runs if was_fitted(run)]
    if 2 * len(fitted) < len(FITTED) or len(fitted) == len(runs):
        raise InputError(f"{options.machine} was fitted to {len(fitted)} of these {len(runs)} rows; some and not all")
    found = effects(machine, models, [run for run in runs if not was_fitted(run)], fitted)
    print(terms_text(found, noise(runs)))
    return 0
