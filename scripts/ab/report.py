"""The report of a matrix: one record as JSON, a Markdown page, and a self-contained html page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from experiments import pages
from experiments.comparison import (
    METRICS,
    NO_HARM,
    PLACE,
    Comparison,
    Figures,
    compare_with_stock,
    figures,
    gates,
    predictions,
)
from experiments.pages import Section, ms

from ab.cells import Outcome
from ab.chart import chart
from ab.matrix import Matrix

Table = tuple[Sequence[str], Sequence[pages.Row]]
METRIC_NAMES = {"total": "whole run", "ttft": "TTFT", "tpot": "TPOT"}


def record(matrix: Matrix, outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The report as data: the cells with their rows, every arm against the best stock arm, and the figures."""
    placed = [
        ((outcome.cell.device, outcome.cell.model.name, outcome.cell.cap, outcome.cell.workload), outcome.rows)
        for outcome in outcomes
    ]
    found = [each for place, rows in placed for metric in METRICS for each in compare_with_stock(place, rows, metric)]
    predicted = [each for place, rows in placed for each in predictions(place, rows)]
    return {
        "name": matrix.name,
        "about": matrix.about,
        "machine": dict(machine),
        "complete": all(outcome.rows or outcome.error for outcome in outcomes) and len(outcomes) == len(matrix.cells),
        "cells": [
            {
                "id": outcome.cell.id, "device": outcome.cell.device, "model": outcome.cell.model.name,
                "cap": outcome.cell.cap, "workload": outcome.cell.workload, "arguments": list(outcome.cell.arguments),
                "seconds": outcome.seconds, "error": outcome.error, "rows": list(outcome.rows),
            }
            for outcome in outcomes
        ],
        "against_stock": [asdict(each) for each in found],
        "figures": [asdict(each) for each in figures(found)],
        "gates": [each for place, rows in placed for each in gates(place, rows)],
        "predictions": predicted,
    }  # fmt: skip


def comparisons_of(document: Mapping[str, Any]) -> list[Comparison]:
    return [Comparison(**row) for row in document["against_stock"]]


def figures_of(document: Mapping[str, Any]) -> list[Figures]:
    return [
        Figures(**{**row, "worst": Comparison(**row["worst"]), "best": Comparison(**row["best"])})
        for row in document["figures"]
    ]


def sections(document: Mapping[str, Any]) -> list[Section]:
    """The report's tables, the same in both formats."""
    return [
        Section("Against the best stock arm of each cell, over all cells", *_figures_table(document)),
        *(Section(f"{METRIC_NAMES[metric]}, times as fast as the best stock arm", *_metric_table(document, metric))
          for metric in METRICS),
        Section("Measured beside predicted, and beside what no placement can beat", *_predictions_table(document)),
        Section("The gate", *_gates_table(document)),
        Section("What every arm did", *_rows_table(document)),
        Section("Cells without a result", *_errors_table(document)),
    ]  # fmt: skip


def markdown(document: Mapping[str, Any]) -> str:
    return pages.markdown(document["name"], _paragraphs(document, "**Not complete:**"), sections(document))


def html_page(document: Mapping[str, Any]) -> str:
    """With the times of each model's cells as bars."""
    measured = [cell for cell in document["cells"] if cell["rows"]]
    models = dict.fromkeys((cell["device"], cell["model"]) for cell in measured)
    charts = [
        chart(document, [cell["id"] for cell in measured if (cell["device"], cell["model"]) == model]).svg()
        for model in models
    ]
    return pages.html_page(document["name"], _paragraphs(document, "Not complete:"), sections(document), charts)


def _paragraphs(document: Mapping[str, Any], not_complete: str) -> list[str]:
    missing = [] if document["complete"] else [f"{not_complete} some cells are still to be measured."]
    return [document["about"], machine_text(document), *missing, *sentences(document)]


def sentences(document: Mapping[str, Any]) -> list[str]:
    """What the tables come to: the no-harm figure of `auto`, what the gate costs, and how large the noise is."""
    made = []
    for each in figures_of(document):
        if (each.arm, each.metric) == ("auto", "total"):
            surely = f", {each.n_surely} of them beyond the noise" if each.n_harmed else ""
            made.append(
                f"auto, whole run, {each.n_cells} cells: worst {each.worst.text()} of the best stock arm "
                f"({_place(each.worst)}), best {each.best.text()} ({_place(each.best)}), geometric mean "
                f"{each.mean:.3f}; {each.n_harmed} below {NO_HARM}{surely}; in {each.n_same} it is that stock arm's "
                "very configuration, which counts as 1."
            )
    seconds = [gate["seconds"] for gate in document["gates"]]
    if seconds:
        made.append(
            f"The gate took {median(seconds):.0f} s in the median cell, {min(seconds):.0f} to {max(seconds):.0f} s, "
            "once for each model, device and class of workload."
        )
    apart = [
        abs(each.noise - 1) for each in comparisons_of(document) if each.noise is not None and each.metric == "total"
    ]
    if apart:
        made.append(
            f"Noise: arms that are one configuration differ by {median(apart):.1%} in the median cell, "
            f"{max(apart):.1%} at most."
        )
    return made


def machine_text(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return ", ".join(f"{key} {value}" for key, value in machine.items() if value)


def _figures_table(document: Mapping[str, Any]) -> Table:
    columns = ("arm", "of", "cells", "geometric mean", "worst cell", "which", "best cell", "which", f"below {NO_HARM}",
               "surely", "same as stock")  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            each.arm, METRIC_NAMES[each.metric], str(each.n_cells), f"{each.mean:.3f}",
            each.worst.text(), _place(each.worst), each.best.text(), _place(each.best), str(each.n_harmed),
            str(each.n_surely), str(each.n_same),
        )
        for each in figures_of(document)
    ]  # fmt: skip
    return columns, rows


def _metric_table(document: Mapping[str, Any], metric: str) -> Table:
    found = [each for each in comparisons_of(document) if each.metric == metric]
    arms = list(dict.fromkeys(each.arm for each in found))
    cells: dict[tuple[str, ...], dict[str, Comparison]] = {}
    for each in found:
        cells.setdefault((each.device, each.model, each.cap, each.workload, each.stock), {})[each.arm] = each
    rows = [(*place, *(by_arm[arm].text() if arm in by_arm else "" for arm in arms)) for place, by_arm in cells.items()]
    return (*PLACE, "best stock", *arms), rows


def _predictions_table(document: Mapping[str, Any]) -> Table:
    rows = []
    for row in document["predictions"]:
        measured, predicted, bound = row["measured_s"], row["predicted_s"], row.get("bound_s")
        rows.append(
            (*_cells_of(row, "arm"), METRIC_NAMES[row["metric"]], f"{1e3 * measured:.1f}", f"{1e3 * predicted:.1f}",
             f"{measured / predicted:.3f}", f"{1e3 * bound:.1f}" if bound else "-",
             f"{bound / measured:.0%}" if bound else "-")
        )  # fmt: skip
    return (*PLACE, "arm", "of", "measured ms", "predicted ms", "measured / predicted", "bound ms",
            "bound / measured"), rows  # fmt: skip


def _gates_table(document: Mapping[str, Any]) -> Table:
    return (*PLACE, "it said", "seconds", "remembered"), [
        (*_cells_of(gate, "said"), f"{gate['seconds']:.1f}", "yes" * gate["remembered"]) for gate in document["gates"]
    ]


def _rows_table(document: Mapping[str, Any]) -> Table:
    rows = [
        (*_cells_of(cell), row["arm"], ms(row["ttft_s"], ".2f"), ms(row["tpot_s"], ".2f"), f"{row['avg_ts']:.1f}",
         _mib(row["device_bytes"]), _mib(row["operator_bytes_on_device"]), "; ".join(map(str, row["notes"])))
        for cell in document["cells"] for row in cell["rows"]
    ]  # fmt: skip
    return (*PLACE, "arm", "TTFT ms", "TPOT ms", "t/s", "device MiB", "weights there MiB", "notes"), rows


def _errors_table(document: Mapping[str, Any]) -> Table:
    return (*PLACE, "why"), [_cells_of(cell, "error") for cell in document["cells"] if cell["error"]]


def _cells_of(row: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The place of a cell, and what else the row has."""
    return tuple(str(row[key]) for key in (*PLACE, *keys))


def _place(found: Comparison) -> str:
    return ", ".join(filter(None, (found.device, found.model, found.cap, found.workload)))


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f}"
