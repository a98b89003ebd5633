"""The report's pictures, as SVG: ratio by cap, TTFT and TPOT by arm, predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments import pictures
from experiments.comparison import METRICS, NO_HARM, Comparison
from experiments.pictures import COLOURS, panels, svg

from ab.report import METRIC_NAMES, comparisons_of

PANEL = (4.2, 3.0)  # inches


def plots(document: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """(caption, svg) of every picture that there is something for; none without matplotlib."""
    if not pictures.is_there():
        return []
    found = comparisons_of(document)
    made: list[tuple[str, bytes]] = []
    for workload in dict.fromkeys(each.workload for each in found):
        here = [each for each in found if each.workload == workload and each.value is not None]
        if here:
            made.append((f"{workload}: times as fast as the best stock arm of the cell, by cap", _by_cap(here)))
    for metric in ("ttft", "tpot"):
        if picture := _times(document, metric):
            made.append((f"{METRIC_NAMES[metric]} of every arm, ms (medians)", picture))
    if document["predictions"]:
        made.append(("Predicted against measured", _predicted(document["predictions"])))
    return made


def _by_cap(found: Sequence[Comparison]) -> bytes:
    """One panel a model and metric; caps along the bottom, an arm a line with its 95 % interval."""
    lines = list(dict.fromkeys((each.device, each.model) for each in found))
    figure, axes = _panels(len(lines), len(METRICS))
    for i, (device, model) in enumerate(lines):
        for j, metric in enumerate(METRICS):
            axis = axes[i][j]
            here = [each for each in found if (each.device, each.model, each.metric) == (device, model, metric)]
            caps = list(dict.fromkeys(each.cap for each in here))
            axis.axhline(1.0, color=pictures.INK, linewidth=1)
            axis.axhline(NO_HARM, color=COLOURS[4], linewidth=1, linestyle=":")
            for index, arm in enumerate(dict.fromkeys(each.arm for each in here)):
                of = [each for each in here if each.arm == arm]
                values = [each.value or 1.0 for each in of]
                errors = (
                    [value - (each.low or value) for value, each in zip(values, of, strict=True)],
                    [(each.high or value) - value for value, each in zip(values, of, strict=True)],
                )
                axis.errorbar(
                    [caps.index(each.cap) + 0.06 * index for each in of], values, yerr=errors, fmt="o-", markersize=4,
                    capsize=3, color=COLOURS[index % len(COLOURS)], label=arm,
                )  # fmt: skip
            axis.set_xticks(range(len(caps)), caps)
            axis.set_title(f"{model} on {device}: {METRIC_NAMES[metric]}", fontsize=10)
    axes[0][0].legend(frameon=False, fontsize=8)
    return svg(figure)


def _times(document: Mapping[str, Any], metric: str) -> bytes | None:
    """One panel a cell: a bar an arm, with the spread of its samples."""
    samples = METRICS[metric]
    cells = [cell for cell in document["cells"] if any(row[samples] for row in cell["rows"])]
    if not cells:
        return None
    width = min(3, len(cells))
    figure, axes = _panels(-(-len(cells) // width), width)
    for axis, cell in zip(axes.flat, cells, strict=False):
        rows = [row for row in cell["rows"] if row[samples]]
        middles = [1e3 * median(row[samples]) for row in rows]
        spread = (
            [middle - 1e3 * min(row[samples]) for middle, row in zip(middles, rows, strict=True)],
            [1e3 * max(row[samples]) - middle for middle, row in zip(middles, rows, strict=True)],
        )
        colours = ["#9aa7b5" if row["arm"].startswith("stock") else COLOURS[0] for row in rows]
        axis.barh([row["arm"] for row in rows], middles, xerr=spread, color=colours, capsize=2)
        axis.invert_yaxis()
        axis.set_title(f"{cell['device']}, {cell['model']}, {cell['cap']}, {cell['workload']}", fontsize=8)
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    return svg(figure)


def _predicted(rows: Sequence[Mapping[str, Any]]) -> bytes:
    figure, axes = _panels(1, 2)
    for axis, metric in zip(axes[0], ("ttft", "tpot"), strict=True):
        here = [row for row in rows if row["metric"] == metric]
        pictures.diagonal(axis, [row[side] for row in here for side in ("predicted_s", "measured_s")])
        for index, arm in enumerate(dict.fromkeys(row["arm"] for row in here)):
            of = [row for row in here if row["arm"] == arm]
            axis.plot([row["measured_s"] for row in of], [row["predicted_s"] for row in of], "o",
                      color=COLOURS[index % len(COLOURS)], label=arm)  # fmt: skip
        axis.set(xlabel="measured, s", ylabel="predicted, s", title=METRIC_NAMES[metric])
        axis.tick_params(axis="x", which="both", labelsize=7, rotation=45)
        axis.legend(frameon=False, fontsize=8)
    return svg(figure)


def _panels(n_rows: int, n_columns: int) -> Any:
    return panels(n_rows, n_columns, (PANEL[0] * n_columns, PANEL[1] * n_rows), layout="constrained")
