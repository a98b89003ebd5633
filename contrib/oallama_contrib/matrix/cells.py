"""A matrix of comparisons: the cells of a TOML file, and the file with their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import mean
from typing import Any

from oallama.bench.records import BenchTest
from oallama.bench.stats import speed_ratio
from oallama.core.codec import from_json, jsonable, parse_json
from oallama.core.errors import UsageError
from oallama.core.files import read_toml, unwritten, write_whole
from oallama_contrib.matrix.report import MeasuredTest

VERSION = 1
JOINED = ("arms",)
"""Options whose value is a list, joined by commas."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison. label: the options in which it differs from other cells; command: the arguments of `oallama
    bench`."""

    label: Mapping[str, str]
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.label.items()) or " ".join(self.command)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a cell: its rows, as bench/rows.py makes them, or the error that ended it."""

    command: tuple[str, ...]
    seconds: float
    rows: tuple[dict[str, Any], ...] = ()
    error: str = ""


def read_matrix(path: Path, flags: Mapping[str, str]) -> tuple[str, tuple[Cell, ...]]:
    """The file's `about` and its cells. flags: the option of each key. Raises UsageError."""
    document = read_toml(path)
    about, settings = document.pop("about", ""), document.pop("setting", None)
    if not isinstance(about, str):
        raise UsageError(f"{path}: about must be a string")
    if not isinstance(settings, list) or not settings or not all(isinstance(setting, dict) for setting in settings):
        raise UsageError(f"{path} has no [[setting]]: write one for each comparison")
    tables = [_one_value_each(path, {**document, **setting}, flags) for setting in settings]
    options = [cell_options for table in tables for cell_options in table]
    varied = [key for key in flags if len({_text(cell_options.get(key, "")) for cell_options in options}) > 1]
    cells = tuple(Cell(_label(cell_options, varied), _command(cell_options, flags)) for cell_options in options)
    if len({cell.command for cell in cells}) < len(cells):
        raise UsageError(f"{path} has the same comparison twice: remove one")
    return about, cells


def _one_value_each(path: Path, table: Mapping[str, Any], flags: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table once for each combination of the values of its lists."""
    for key, value in table.items():
        if key not in flags:
            raise UsageError(f"{path}: unknown key {key}; choose from about, setting, {', '.join(flags)}")
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(item, (str, int, float)) for item in values):
            raise UsageError(f"{path}: {key} is neither a value nor a list of values")
    if "model" not in table:
        raise UsageError(f"{path}: a setting names no model")
    lists = [[value] if key in JOINED or not isinstance(value, list) else value for key, value in table.items()]
    return [dict(zip(table, values, strict=True)) for values in product(*lists)]


def _command(options: Mapping[str, Any], flags: Mapping[str, str]) -> tuple[str, ...]:
    words: list[str] = []
    for key, flag in flags.items():
        value = options.get(key, False)
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, _text(value)]
    return tuple(words)


def _label(options: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    texts = {key: _text(options[key]) for key in keys if key in options}
    return {key: Path(text).stem if key == "model" else text for key, text in texts.items()}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def measured_tests(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> list[MeasuredTest]:
    """The rows of each test of each cell that has any, beside the fastest stock arm."""
    labels = {cell.command: cell.label for cell in cells}
    measured = []
    for outcome in outcomes:
        tests = [(test, tuple(rows)) for test, rows in groupby(outcome.rows, _test)]
        for test, rows in tests:
            label = {**labels[outcome.command], **({"test": test} if len(tests) > 1 else {})}
            measured.append(MeasuredTest(label, rows, against_stock(rows)))
    return measured


def against_stock(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float | None], ...]:
    """Speed of each row's arm relative to the fastest valid stock arm, as text and as number. An arm with the same
    configuration as that arm is equally fast, whatever its samples say."""
    stock = [row for row in rows if row["arm"].startswith("stock") and not row["problems"]]
    if not stock:
        return (("", None),) * len(rows)
    best = min(stock, key=lambda row: mean(row["samples_ns"]))

    def row_ratio(row: Mapping[str, Any]) -> tuple[str, float | None]:
        if row["problems"]:
            return "refused", None
        if (row["same_as"] or row["arm"]) == (best["same_as"] or best["arm"]):
            return "1 (same)", 1.0
        ratio = speed_ratio(best["samples_ns"], row["samples_ns"])
        if ratio is None:
            return "too few samples", None
        return f"{ratio.value:.2f} ({ratio.low:.2f}..{ratio.high:.2f})", ratio.value

    return tuple(row_ratio(row) for row in rows)


def _test(row: Mapping[str, Any]) -> str:
    return BenchTest(row["n_prompt"], row["n_gen"], row["n_depth"]).label


class ResultFile:
    """The result of a matrix, replaced whole after each cell. Raises UsageError if the file is cut, is another
    matrix's, or cannot be written."""

    def __init__(self, path: Path, about: str, cells: Sequence[Cell]) -> None:
        self.path = path
        self.about = about
        self._order = [cell.command for cell in cells]
        self._outcomes = {outcome.command: outcome for outcome in self._read()}
        unknown = next((command for command in self._outcomes if command not in self._order), None)
        if unknown is not None:
            raise UsageError(
                f"{path} is the result of another matrix, with `{' '.join(unknown)}`: name another file with -o"
            )

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes so far, in the order of the matrix."""
        return [self._outcomes[command] for command in self._order if command in self._outcomes]

    def is_done(self, cell: Cell) -> bool:
        outcome = self._outcomes.get(cell.command)
        return outcome is not None and not outcome.error

    def put(self, outcome: Outcome) -> None:
        self._outcomes[outcome.command] = outcome
        try:
            write_whole(self.path, json.dumps(jsonable(self.document()), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise unwritten(UsageError, str(self.path), error) from None

    def document(self) -> dict[str, Any]:
        return {"version": VERSION, "about": self.about, "cells": [asdict(outcome) for outcome in self.outcomes]}

    def _read(self) -> list[Outcome]:
        try:
            document = parse_json(self.path.read_bytes())
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']}")
            return [from_json(Outcome, cell, f"cell {number}") for number, cell in enumerate(document["cells"])]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{self.path} is not the result of a matrix ({error}): remove it, or name another file with -o"
            ) from None
