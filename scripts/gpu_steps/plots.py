"""Pictures of the results: every arm against the best stock arm beside what the papers print, small copies, and the
streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import pictures
from experiments.comparison import compare_with_stock
from experiments.pictures import CPU, DEVICE, GREY, INK, JOIN, LIGHT, LINK, panels
from experiments.published import OATO_PAPER

from gpu_steps import copy_tables, tables

COLOURS = {"oato": "#2a6f97", "split": "#d1495b", "scheinfer": "#66a182", "auto": "#8d6a9f"}
IDLE = "#e8e8e8"
STEPS = {"host": ("CPU", CPU), "launch": ("CPU", LIGHT), "wait": ("CPU", IDLE), "join": ("CPU", JOIN),
         "send": ("device", LIGHT), "resident": ("device", DEVICE), "streamed": ("device", "#7fbf9f"),
         "stall": ("device", IDLE), "fetch": ("device", LIGHT), "copy": ("link", LINK)}  # fmt: skip
"""Step of a trace -> (lane, colour)."""

STEP_NAMES = {CPU: "CC", DEVICE: "GG", "#7fbf9f": "CG", LINK: "copy", JOIN: "join", LIGHT: "launch, send, fetch",
              IDLE: "wait, stall"}  # fmt: skip


def write_plots(documents: Mapping[str, Any], folder: Path) -> list[Path]:
    """The pictures that could be made; [] without matplotlib."""
    if not pictures.is_there():
        return []
    made = []
    for name, document in documents.items():
        for kind, draw in (("ratios", _ratios), ("copies", _copies), ("trace", _trace)):
            figure = draw(document)
            if figure is not None:
                path = folder / f"{name.removesuffix('.json')}-{kind}.svg"
                pictures.write(figure, path)
                made.append(path)
    return made


def _ratios(document: Mapping[str, Any]) -> Any:
    """Whole run, times as fast as the best stock arm: a group a cell, a mark an arm, the paper's as a line."""
    cells = []
    for _, step in tables.of_kind(document, "ab"):
        data = step["data"]
        place = (document["device"], data["model"], data["cap"], "")
        rows = [a for a in compare_with_stock(place, data["rows"], "total") if a.value is not None]
        if rows:
            cells.append((f"{data['model']}\n{data['cap']}", data, rows))
    if not cells:
        return None
    figure, axes = panels(1, 1, (9, 0.55 * len(cells) + 1.6), layout="constrained")
    (axis,) = axes.flat
    seen = set()
    for i, (_, data, rows) in enumerate(cells):
        for j, a in enumerate(rows):
            value, low, high = (a.value or 0.0, a.low or 0.0, a.high or 0.0)
            axis.errorbar(
                value, i + 0.14 * (j - (len(rows) - 1) / 2), xerr=[[value - low], [high - value]], fmt="o", ms=5,
                label=None if a.arm in seen else a.arm, color=COLOURS.get(a.arm, "#555"),
            )  # fmt: skip
            seen.add(a.arm)
        if data["paper"] == "oato" and data["cap"] in OATO_PAPER and "f16" in data["model"]:
            axis.plot([1 + OATO_PAPER[data["cap"]] / 100] * 2, [i - 0.4, i + 0.4], color=GREY, lw=2,
                      label=None if "paper" in seen else "OATO paper (RTX 4090)")  # fmt: skip
            seen.add("paper")
    axis.axvline(1.0, color=INK, lw=0.8)
    axis.set_yticks(range(len(cells)), [label for label, _, _ in cells])
    axis.invert_yaxis()
    axis.set_xlabel(f"whole run, times as fast as the best stock arm ({document['device']})")
    axis.legend(loc="best", frameon=False)
    return figure


def _copies(document: Mapping[str, Any]) -> Any:
    """Every sample of the small copies, a line for what they are begun behind; None where there are none."""
    rows = copy_tables.copy_rows(document)
    if not rows:
        return None
    kinds = list(dict.fromkeys(row["behind"] for row in rows))
    sizes = list(dict.fromkeys(row["small_bytes"] for row in rows))
    figure, axes = panels(1, 1, (9, 0.45 * len(kinds) + 1.4), layout="constrained")
    (axis,) = axes.flat
    for row in rows:
        i, j = kinds.index(row["behind"]), sizes.index(row["small_bytes"])
        height = i + 0.3 * (j - (len(sizes) - 1) / 2)
        label = copy_tables.size(row["small_bytes"]) if i == 0 else None
        samples_us = [1e6 * seconds for seconds in row["samples_s"]]
        axis.plot(samples_us, [height] * len(samples_us), "|", ms=7, color=pictures.COLOURS[j], label=label)
        if row["piece_s"] and j == 0:
            axis.plot([1e6 * row["piece_s"]] * 2, [i - 0.4, i + 0.4], color=GREY, lw=1.5,
                      label="one piece at the large copy's rate" if i == 1 else None)  # fmt: skip
    axis.set(xscale="log", xlabel=f"µs from its call until it is done ({document['device']})")
    axis.set_yticks(range(len(kinds)), ["alone" if kind == "alone" else f"behind {kind}" for kind in kinds])
    axis.invert_yaxis()
    axis.legend(loc="best", frameon=False, fontsize=8)
    return figure


def _trace(document: Mapping[str, Any]) -> Any:
    """The first phases of one token of each plan: CPU, device and link; None where there is no trace."""
    traces = [row for _, step in tables.of_kind(document, "timeline") for row in step["data"]
              if row["what"] == "trace" and row["token"]["spans"]]  # fmt: skip
    if not traces:
        return None
    figure, axes = panels(len(traces), 1, (9, 1.5 * len(traces) + 0.8), layout="constrained")
    for axis, row in zip(axes.flat, traces, strict=True):
        spans = [(span["step"], span["begin_s"], span["end_s"]) for span in row["token"]["spans"]]
        pictures.lanes(axis, ("CPU", "device", "link"), spans, STEPS)
        axis.set_title(f"{row['plan']}: one token", fontsize=9, loc="left")
    axes.flat[-1].set_xlabel(f"ms ({document['device']})")
    pictures.key(figure, STEP_NAMES, loc="outside right center", ncol=1)
    return figure
