"""The report of a matrix: one record as JSON, a Markdown page, and a self-contained html page. Pure but for plots."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ab.cells import Outcome
from ab.matrix import Matrix
from ab.summary import METRICS, NO_HARM, Against, Figures, Gate, against_stock, figures, gates, predictions

METRIC_NAMES = {"total": "whole run", "ttft": "TTFT", "tpot": "TPOT"}


def record(matrix: Matrix, outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The report as data: the cells with their rows, every arm against the best stock arm, and the figures."""
    placed = [
        ((outcome.cell.device, outcome.cell.model.name, outcome.cell.cap, outcome.cell.workload), outcome.rows)
        for outcome in outcomes
    ]
    found = [each for place, rows in placed for metric in METRICS for each in against_stock(place, rows, metric)]
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
        "gates": [asdict(each) for place, rows in placed for each in gates(place, rows)],
        "predictions": predicted,
    }  # fmt: skip


def against_of(document: Mapping[str, Any]) -> list[Against]:
    return [Against(**row) for row in document["against_stock"]]


def figures_of(document: Mapping[str, Any]) -> list[Figures]:
    return [
        Figures(**{**row, "worst": Against(**row["worst"]), "best": Against(**row["best"])})
        for row in document["figures"]
    ]


def sections(document: Mapping[str, Any]) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """The report's tables: (heading, column names, rows), the same in both formats."""
    return [
        ("Against the best stock arm of each cell, over all cells", *_figures_table(document)),
        *((f"{METRIC_NAMES[metric]}, times as fast as the best stock arm", *_metric_table(document, metric))
          for metric in METRICS),
        ("The gate", *_gates_table(document)),
        ("What every arm did", *_rows_table(document)),
        ("Cells without a result", *_errors_table(document)),
        ("Arms without a ratio", *_refused_table(document)),
    ]  # fmt: skip


def markdown(document: Mapping[str, Any]) -> str:
    lines = [f"# {document['name']}", "", document["about"], "", machine_text(document)]
    if not document["complete"]:
        lines += ["", "**Not complete:** some cells are still to be measured."]
    for sentence in sentences(document):
        lines += ["", sentence]
    for heading, columns, rows in sections(document):
        if rows:
            lines += ["", f"## {heading}", "", _md_line(columns), _md_line(["---"] * len(columns))]
            lines += [_md_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def html_page(document: Mapping[str, Any], plots: Sequence[tuple[str, bytes]]) -> str:
    """plots: (caption, svg). Everything is in the page; it loads nothing and runs nothing."""
    parts = [
        f"<h1>{_e(document['name'])}</h1>",
        f"<p>{_e(document['about'])}</p>",
        f"<p>{_e(machine_text(document))}</p>",
    ]
    if not document["complete"]:
        parts.append("<p><strong>Not complete:</strong> some cells are still to be measured.</p>")
    parts += [f"<p>{_e(sentence)}</p>" for sentence in sentences(document)]
    for caption, svg in plots:
        data = base64.b64encode(svg).decode("ascii")
        alt = _e(caption)
        parts.append(
            f'<figure><img alt="{alt}" src="data:image/svg+xml;base64,{data}"><figcaption>{alt}</figcaption></figure>'
        )
    for heading, columns, rows in sections(document):
        if rows:
            head = "".join(f"<th>{_e(column)}</th>" for column in columns)
            body = "".join("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            parts.append(f"<h2>{_e(heading)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    digest = base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{_e(document['name'])}</title><style>{_CSS}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


_CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2733}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #d6dde5;text-align:left}"
    "figure{margin:1.5rem 0}img{max-width:100%}figcaption{color:#5b6b7f}"
)


def sentences(document: Mapping[str, Any]) -> list[str]:
    """What the tables come to: the no-harm figure of `auto`, what the gate costs, and how large the noise is."""
    made = []
    for each in figures_of(document):
        if (each.arm, each.metric) == ("auto", "total"):
            surely = f", {each.n_surely} of them beyond the noise" if each.n_harmed else ""
            made.append(
                f"auto, whole run, {each.n_cells} cells: worst {ratio_text(each.worst)} of the best stock arm "
                f"({_place(each.worst)}), best {ratio_text(each.best)} ({_place(each.best)}), geometric mean "
                f"{each.mean:.3f}; {each.n_harmed} below {NO_HARM}{surely}; in {each.n_same} it is that stock arm's "
                "very configuration, which counts as 1."
            )
    seconds = [gate["seconds"] for gate in document["gates"]]
    if seconds:
        made.append(
            f"The gate took {median(seconds):.0f} s in the median cell, {min(seconds):.0f} to {max(seconds):.0f} s, "
            "once for each model, device and class of workload."
        )
    apart = [abs(each.noise - 1) for each in against_of(document) if each.noise is not None and each.metric == "total"]
    if apart:
        made.append(
            f"Noise: arms that are one configuration differ by {median(apart):.1%} in the median cell, "
            f"{max(apart):.1%} at most."
        )
    return made


def machine_text(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return ", ".join(f"{key} {value}" for key, value in machine.items() if value)


def ratio_text(against: Against) -> str:
    if against.value is None:
        return "-"
    if against.same:
        return "1 (same)"
    return f"{against.value:.3f} ({against.low:.3f}..{against.high:.3f})"


def _figures_table(document: Mapping[str, Any]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    columns = ("arm", "of", "cells", "geometric mean", "worst cell", "which", "best cell", "which", f"below {NO_HARM}",
               "surely", "same as stock")  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            each.arm, METRIC_NAMES[each.metric], str(each.n_cells), f"{each.mean:.3f}",
            ratio_text(each.worst), _place(each.worst), ratio_text(each.best), _place(each.best), str(each.n_harmed),
            str(each.n_surely), str(each.n_same),
        )
        for each in figures_of(document)
    ]  # fmt: skip
    return columns, rows


def _metric_table(document: Mapping[str, Any], metric: str) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    found = [each for each in against_of(document) if each.metric == metric]
    arms = list(dict.fromkeys(each.arm for each in found))
    cells: dict[tuple[str, ...], dict[str, Against]] = {}
    for each in found:
        cells.setdefault((each.device, each.model, each.cap, each.workload, each.stock), {})[each.arm] = each
    rows = [(*place, *(ratio_text(of[arm]) if arm in of else "" for arm in arms)) for place, of in cells.items()]
    return ("device", "model", "cap", "workload", "best stock", *arms), rows


def _gates_table(document: Mapping[str, Any]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = [
        (gate.device, gate.model, gate.cap, gate.workload, gate.said, f"{gate.seconds:.1f}", "yes" * gate.remembered)
        for gate in (Gate(**row) for row in document["gates"])
    ]
    return ("device", "model", "cap", "workload", "it said", "seconds", "remembered"), rows


def _rows_table(document: Mapping[str, Any]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    columns = (
        "device",
        "model",
        "cap",
        "workload",
        "arm",
        "TTFT ms",
        "TPOT ms",
        "t/s",
        "device MiB",
        "weights there MiB",
        "notes",
    )
    rows: list[tuple[str, ...]] = [
        (
            cell["device"], cell["model"], cell["cap"], cell["workload"], row["arm"],
            _ms(row["ttft_s"]), _ms(row["tpot_s"]),
            f"{row['avg_ts']:.1f}", _mib(row["device_bytes"]), _mib(row["operator_bytes_on_device"]),
            "; ".join(str(note) for note in row["notes"]),
        )
        for cell in document["cells"]
        for row in cell["rows"]
    ]  # fmt: skip
    return columns, rows


def _errors_table(document: Mapping[str, Any]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = [
        (c["device"], c["model"], c["cap"], c["workload"], c["error"]) for c in document["cells"] if c["error"]
    ]
    return ("device", "model", "cap", "workload", "why"), rows


def _refused_table(document: Mapping[str, Any]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = [
        (each.device, each.model, each.cap, each.workload, each.arm, METRIC_NAMES[each.metric], each.refused)
        for each in against_of(document)
        if each.refused
    ]
    return ("device", "model", "cap", "workload", "arm", "of", "why"), rows


def _place(against: Against) -> str:
    return ", ".join(filter(None, (against.device, against.model, against.cap, against.workload)))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f}"


def _md_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


_e: Callable[[Any], str] = lambda text: html.escape(str(text), quote=True)  # noqa: E731
