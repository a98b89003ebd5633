"""How far predictions are from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from card_fit.predict import Predictor
from card_fit.tables import Run
from oallama.report.table import plain, table

PHASES = ("prompt", "eval")
Row = dict[str, Any]


def rows_of(predictor: Predictor, runs: Sequence[Run], fitted: Callable[[Run], bool] | None = None) -> list[Row]:
    """Every run with what is predicted of it. fitted: whether the machine's rates are from it."""
    made = []
    for run in runs:
        out = predictor(run)
        row = {**asdict(run), "prompt_tps_predicted": out.prompt_tps, "eval_tps_predicted": out.eval_tps}
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
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["context"])):
        groups.setdefault((row["model"], str(row["context"])), []).append(row)
    groups["all", ""] = list(rows)
    lines = [(*place, str(len(group)), *_cells(group)) for place, group in groups.items()]
    columns = " | ".join(f"> {phase}: median | > lean | > worst | > at -ngl" for phase in PHASES)
    return plain(table("", f"model | > context | > runs | {columns}", lines))


def _cells(rows: Sequence[Row]) -> Iterator[str]:
    for phase in PHASES:
        at = worst(rows, phase)
        lean = median(error(row, phase) for row in rows)
        yield from (f"{median_error(rows, phase):.1%}", f"{lean:+.1%}", f"{error(at, phase):+.1%}", str(at["ngl"]))
