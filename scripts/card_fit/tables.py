"""Runs of stock llama.cpp, as CSV tables have them, or as `real_card predict --json` wrote them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.inputs import InputError

from oallama.core.codec import CodecError, from_json

COLUMNS = ("Model", "Context", "NGL", "Ubatch", "PromptTokens", "PromptTPS", "EvalTokens", "EvalTPS")


@dataclass(frozen=True)
class PublishedRun:
    """One run of llama-cli: what was asked for, and tokens per second."""

    model: str
    context: int  # -c
    ngl: int  # -ngl
    ubatch: int  # -ub
    budget_mb: int | None  # VRAM that NGL was chosen for
    n_prompt: int
    n_gen: int
    prompt_tps: float
    eval_tps: float  # of the tokens after the first

    @property
    def config(self) -> tuple[str, int, int, int, int, int]:
        """Runs with the same one are repetitions."""
        return (self.model, self.context, self.ngl, self.ubatch, self.n_prompt, self.n_gen)


def read_tables(paths: list[Path]) -> list[PublishedRun]:
    """The runs of all tables that came to an end. Raises InputError for what is no such table."""
    return [run for path in paths for run in _read(path)]


def _read(path: Path) -> list[PublishedRun]:
    if path.suffix == ".json":
        return _read_json(path)
    rows = read_csv(path, COLUMNS)
    runs = [_run(row, where) for where, row in rows if row.get("Status") in (None, "SUCCESS")]
    if not runs:
        raise InputError(f"{path} has no run that came to an end")
    return runs


def _read_json(path: Path) -> list[PublishedRun]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [from_json(PublishedRun, row, f"{path}: rows[{i}]") for i, row in enumerate(rows)]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except CodecError as error:
        raise InputError(str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is nothing that `real_card predict --json` wrote") from None


def read_csv(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """(file and line, row) of a table that has these columns. Raises InputError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in columns if name not in (rows.fieldnames or ())]
            if missing:
                raise InputError(f"{path} has no column {missing[0]}: it takes {', '.join(columns)}")
            return [(f"{path}, line {rows.line_num}", row) for row in rows]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV table: {error}") from None


def _run(row: dict[str, str], where: str) -> PublishedRun:
    return PublishedRun(
        model=row["Model"],
        context=int(_number(row, "Context", where)),
        ngl=int(_number(row, "NGL", where, least=0)),
        ubatch=int(_number(row, "Ubatch", where)),
        budget_mb=int(_number(row, "MVA", where)) if row.get("MVA") else None,
        n_prompt=int(_number(row, "PromptTokens", where)),
        n_gen=int(_number(row, "EvalTokens", where)),
        prompt_tps=_number(row, "PromptTPS", where, least=0.001),
        eval_tps=_number(row, "EvalTPS", where, least=0.001),
    )


def _number(row: dict[str, str], name: str, where: str, least: float = 1) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        raise InputError(f"{where}: {name} is {row[name]!r}, not a number") from None
    if not least <= value <= 1e9:
        raise InputError(f"{where}: {name} is {row[name]}, which cannot be")
    return value
