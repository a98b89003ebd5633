"""Runs of stock llama.cpp, as CSV tables have them, or as `real_card predict --json` wrote them."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from experiments.inputs import InputError

from oallama.core.codec import CodecError, Count, Positive, Size, from_json

COLUMNS = {
    "model": "Model", "context": "Context", "ngl": "NGL", "ubatch": "Ubatch", "n_prompt": "PromptTokens",
    "prompt_tps": "PromptTPS", "n_gen": "EvalTokens", "eval_tps": "EvalTPS",
}  # fmt: skip
BUDGET = "MVA"  # a column that may be there


@dataclass(frozen=True)
class Run:
    """One run of llama-cli: what was asked for, and tokens per second."""

    model: str
    context: Size  # -c
    ngl: Count  # -ngl
    ubatch: Size  # -ub
    budget_mb: Size | None  # VRAM that NGL was chosen for
    n_prompt: Size
    n_gen: Size
    prompt_tps: Positive
    eval_tps: Positive  # of the tokens after the first

    @property
    def config(self) -> tuple[str, int, int, int, int, int]:
        """Runs with the same one are repetitions."""
        return (self.model, self.context, self.ngl, self.ubatch, self.n_prompt, self.n_gen)


def read_tables(paths: list[Path]) -> list[Run]:
    """The runs of all tables that came to an end. Raises InputError for what is no such table."""
    return [run for path in paths for run in _read(path)]


def _read(path: Path) -> list[Run]:
    try:
        return _read_json(path) if path.suffix == ".json" else _read_csv(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except CodecError as error:
        raise InputError(str(error)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV table: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is nothing that `real_card predict --json` wrote") from None


def _read_json(path: Path) -> list[Run]:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [from_json(Run, row, f"{path}: rows[{i}]") for i, row in enumerate(rows)]


def _read_csv(path: Path) -> list[Run]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in COLUMNS.values() if name not in (rows.fieldnames or ())]
        if missing:
            raise InputError(f"{path} has no column {missing[0]}: it takes {', '.join(COLUMNS.values())}")
        runs = [_run(row, f"{path}, line {rows.line_num}") for row in rows if row.get("Status") in (None, "SUCCESS")]
    if not runs:
        raise InputError(f"{path} has no run that came to an end")
    return runs


def _run(row: dict[str, str], where: str) -> Run:
    values = {name: _number(row[column]) if name != "model" else row[column] for name, column in COLUMNS.items()}
    return from_json(Run, {**values, "budget_mb": _number(row.get(BUDGET)) or None}, where)


def _number(text: str | None) -> int | float | str | None:
    """A whole number where it is one; what is no number as it stands."""
    for kind in (int, float):
        try:
            return kind(text or "")
        except ValueError:
            continue
    return text
