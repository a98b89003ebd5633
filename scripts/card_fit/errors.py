"""Errors of predictions against measured runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from card_fit.predict import Predictor
from card_fit.tables import PublishedRun

PHASES = ("prompt", "eval")
Row = dict[str, Any]


def rows_of(
    predictor: Predictor, runs: Sequence[PublishedRun], fitted: Callable[[PublishedRun], bool] | None = None
) -> list[Row]:
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
