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
        rows = [a for a in against_stock(data["model"], data["cap"], "", data["rows"], "total") if a.value is not None]
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


def _trace(document: Mapping[str, Any]) -> Any:
    """Kernels and copies of the decode trace by stream; None where there is none."""
    from matplotlib.figure import Figure

    for _, step in tables.of_kind(document, "timeline"):
        for row in step["data"]:
            if row["what"] == "decode trace" and row.get("events"):
                events = row["events"][:400]
                streams = sorted({str(event["stream"]) for event in events})
                figure = Figure(figsize=(9, 0.6 * len(streams) + 1.2), layout="constrained")
                axes = figure.subplots()
                for event in events:
                    colour = "#d1495b" if event["kind"] == "copy" else "#2a6f97"
                    axes.barh(streams.index(str(event["stream"])), event["us"], left=event["start_us"], color=colour)
                axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
                axes.set_xlabel("µs: kernels blue, copies red")
                return figure
    return None
