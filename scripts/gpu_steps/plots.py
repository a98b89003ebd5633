"""Pictures of the results: every arm against the best stock arm beside what the papers print, and the streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ab.summary import against_stock

from gpu_steps import tables
from gpu_steps.published import OATO_PAPER

COLOURS = {"oato": "#2a6f97", "split": "#d1495b", "scheinfer": "#66a182", "auto": "#8d6a9f"}


def write_plots(documents: Mapping[str, Any], folder: Path) -> list[Path]:
    """The pictures that could be made; [] without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "oallama", "font.size": 9})
    made = []
    for name, document in documents.items():
        stem = name.removesuffix(".json")
        for kind, draw in (("ratios", _ratios), ("trace", _trace)):
            figure = draw(document)
            if figure is not None:
                path = folder / f"{stem}-{kind}.svg"
                figure.savefig(path, metadata={"Date": None})
                made.append(path)
    return made


def _ratios(document: Mapping[str, Any]) -> Any:
    """Whole run, times as fast as the best stock arm: a group a cell, a mark an arm, the paper's as a line."""
    from matplotlib.figure import Figure

    cells = []
    for _, step in tables.of_kind(document, "ab"):
        data = step["data"]
        place = (document["device"], data["model"], data["cap"], "")
        rows = [a for a in against_stock(place, data["rows"], "total") if a.value is not None]
        if rows:
            cells.append((f"{data['model']}\n{data['cap']}", data, rows))
    if not cells:
        return None
    figure = Figure(figsize=(9, 0.55 * len(cells) + 1.6), layout="constrained")
    axes = figure.subplots()
    seen = set()
    for i, (_, data, rows) in enumerate(cells):
        for j, a in enumerate(rows):
            label = a.arm if a.arm not in seen else None
            seen.add(a.arm)
            value, low, high = (a.value or 0.0, a.low or 0.0, a.high or 0.0)
            errors = [[value - low], [high - value]]
            axes.errorbar(value, i + 0.14 * (j - (len(rows) - 1) / 2), xerr=errors, fmt="o", ms=5, label=label,
                          color=COLOURS.get(a.arm, "#555"))  # fmt: skip
        if data["paper"] == "oato" and data["cap"] in OATO_PAPER and "f16" in data["model"]:
            axes.plot([1 + OATO_PAPER[data["cap"]] / 100] * 2, [i - 0.4, i + 0.4], color="#999", lw=2,
                      label=None if "paper" in seen else "OATO paper (RTX 4090)")  # fmt: skip
            seen.add("paper")
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_yticks(range(len(cells)), [label for label, _, _ in cells])
    axes.invert_yaxis()
    axes.set_xlabel(f"whole run, times as fast as the best stock arm ({document['device']})")
    axes.legend(loc="best", frameon=False)
    return figure


LANES = {"host": "CPU", "launch": "CPU", "wait": "CPU", "join": "CPU", "send": "device", "resident": "device",
         "streamed": "device", "stall": "device", "fetch": "device", "copy": "link"}  # fmt: skip
STEP_COLOURS = {"host": "#66a182", "launch": "#b8b8b8", "wait": "#e8e8e8", "join": "#8d6a9f", "send": "#b8b8b8",
                "resident": "#2a6f97", "streamed": "#61a5c2", "stall": "#e8e8e8", "fetch": "#b8b8b8",
                "copy": "#d1495b"}  # fmt: skip


def _trace(document: Mapping[str, Any]) -> Any:
    """The first phases of one token of each plan: CPU, device and link; None where there is no trace."""
    from matplotlib.figure import Figure

    traces = [row for _, step in tables.of_kind(document, "timeline") for row in step["data"]
              if row["what"] == "trace" and row["token"]["spans"]]  # fmt: skip
    if not traces:
        return None
    figure = Figure(figsize=(9, 1.5 * len(traces) + 0.8), layout="constrained")
    lanes = ["CPU", "device", "link"]
    seen = set()
    for axes, row in zip(figure.subplots(len(traces), squeeze=False)[:, 0], traces, strict=True):
        for span in row["token"]["spans"]:
            step = span["step"]
            axes.barh(lanes.index(LANES[step]), 1e3 * (span["end_s"] - span["begin_s"]), left=1e3 * span["begin_s"],
                      color=STEP_COLOURS[step], height=0.7, label=None if step in seen else step)  # fmt: skip
            seen.add(step)
        axes.set_yticks(range(3), lanes)
        axes.invert_yaxis()
        axes.set_title(f"{row['plan']}: one token", fontsize=9, loc="left")
    axes.set_xlabel(f"ms ({document['device']})")
    figure.legend(loc="outside right center", frameon=False)
    return figure
