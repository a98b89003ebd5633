"""The report's pictures, as SVG: ratio by cap, TTFT and TPOT by arm, predicted against measured. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ab.report import METRIC_NAMES, against_of
from ab.summary import METRICS, NO_HARM, Against

COLOURS = ("#0b4f8a", "#c2571a", "#3f7d3a", "#7a4b94", "#9c2f3f", "#5b6b7f", "#b08a00")


def plots(document: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """(caption, svg) of every picture that there is something for; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    found = against_of(document)
    made: list[tuple[str, bytes]] = []
    workloads = list(dict.fromkeys(each.workload for each in found))
    for workload in workloads:
        here = [each for each in found if each.workload == workload and each.value is not None]
        if here:
            made.append((f"{workload}: times as fast as the best stock arm of the cell, by cap", _by_cap(here)))
    for metric in ("ttft", "tpot"):
        if picture := _times(document, metric):
            made.append((f"{METRIC_NAMES[metric]} of every arm, ms (medians)", picture))
    if document["predictions"]:
        made.append(("Predicted against measured", _predicted(document["predictions"])))
    return made


def _by_cap(found: Sequence[Against]) -> bytes:
    """One panel a model and metric; caps along the bottom, an arm a line with its 95 % interval."""
    lines = list(dict.fromkeys((each.device, each.model) for each in found))
    figure, axes = _subplots(len(lines), len(METRICS))
    for i, (device, model) in enumerate(lines):
        for j, metric in enumerate(METRICS):
            axis = axes[i][j]
            here = [each for each in found if (each.device, each.model, each.metric) == (device, model, metric)]
            caps = list(dict.fromkeys(each.cap for each in here))
            axis.axhline(1.0, color="#1c2733", linewidth=1)
            axis.axhline(NO_HARM, color="#9c2f3f", linewidth=1, linestyle=":")
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
    return _svg(figure)


def _times(document: Mapping[str, Any], metric: str) -> bytes | None:
    """One panel a cell: a bar an arm, with the spread of its samples."""
    from statistics import median

    key = METRICS[metric]
    cells = [cell for cell in document["cells"] if any(row[key] for row in cell["rows"])]
    if not cells:
        return None
    width = min(3, len(cells))
    figure, axes = _subplots(-(-len(cells) // width), width)
    panels = [axis for line in axes for axis in line]
    for axis, cell in zip(panels, cells, strict=False):
        rows = [row for row in cell["rows"] if row[key]]
        middles = [1e3 * median(row[key]) for row in rows]
        spread = (
            [middle - 1e3 * min(row[key]) for middle, row in zip(middles, rows, strict=True)],
            [1e3 * max(row[key]) - middle for middle, row in zip(middles, rows, strict=True)],
        )
        colours = ["#9aa7b5" if row["arm"].startswith("stock") else COLOURS[0] for row in rows]
        axis.barh([row["arm"] for row in rows], middles, xerr=spread, color=colours, capsize=2)
        axis.invert_yaxis()
        axis.set_title(f"{cell['device']}, {cell['model']}, {cell['cap']}, {cell['workload']}", fontsize=8)
    for axis in panels[len(cells) :]:
        axis.set_visible(False)
    return _svg(figure)


def _predicted(rows: Sequence[Mapping[str, Any]]) -> bytes:
    figure, axes = _subplots(1, 2)
    for axis, metric in zip(axes[0], ("ttft", "tpot"), strict=True):
        here = [row for row in rows if row["metric"] == metric]
        times = [row[side] for row in here for side in ("predicted_s", "measured_s")] or [1.0]
        low, high = 0.8 * min(times), 1.25 * max(times)
        axis.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#cfe0f2", label="±10 %")
        axis.plot([low, high], [low, high], color="#5b6b7f", linewidth=1)
        for index, arm in enumerate(dict.fromkeys(row["arm"] for row in here)):
            of = [row for row in here if row["arm"] == arm]
            axis.plot(
                [row["measured_s"] for row in of], [row["predicted_s"] for row in of], "o",
                color=COLOURS[index % len(COLOURS)], label=arm,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title=METRIC_NAMES[metric])
        axis.tick_params(axis="x", which="both", labelsize=7, rotation=45)
        axis.legend(frameon=False, fontsize=8)
    return _svg(figure)


def _subplots(n_rows: int, n_columns: int) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(n_rows, n_columns, figsize=(4.2 * n_columns, 3.0 * n_rows), squeeze=False)
    return figure, axes


def _svg(figure: Any) -> bytes:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    out = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": "oallama"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue()
