"""Pictures of the results: the times of every arm, small copies, and the streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ab.chart import chart
from experiments import pictures
from experiments.pictures import CPU, DEVICE, GREY, JOIN, LIGHT, LINK, panels

from gpu_steps import copy_tables, tables

IDLE = "#e8e8e8"
STEPS = {"host": ("CPU", CPU), "launch": ("CPU", LIGHT), "wait": ("CPU", IDLE), "join": ("CPU", JOIN),
         "send": ("device", LIGHT), "resident": ("device", DEVICE), "streamed": ("device", "#7fbf9f"),
         "stall": ("device", IDLE), "fetch": ("device", LIGHT), "copy": ("link", LINK)}  # fmt: skip
"""Step of a trace -> (lane, colour)."""

STEP_NAMES = {CPU: "CC", DEVICE: "GG", "#7fbf9f": "CG", LINK: "copy", JOIN: "join", LIGHT: "launch, send, fetch",
              IDLE: "wait, stall"}  # fmt: skip


def write_plots(documents: Mapping[str, Any], folder: Path) -> list[Path]:
    """The pictures that could be made; without matplotlib only the times of the comparisons."""
    made = []
    for name, document in documents.items():
        stem = name.removesuffix(".json")
        if cells := cells_of(document):
            made.append(folder / f"{stem}-times.svg")
            made[-1].write_text(chart({"cells": cells, "machine": {}}, [cell["id"] for cell in cells]).svg(), "utf-8")
        for kind, draw in (("copies", _copies), ("trace", _trace)) if pictures.is_there() else ():
            figure = draw(document)
            if figure is not None:
                made.append(folder / f"{stem}-{kind}.svg")
                pictures.write(figure, made[-1])
    return made


def cells_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of a results file, as a report of scripts/ab has its cells."""
    return [
        {"id": name, "device": document["device"], "model": step["data"]["model"], "rows": step["data"]["rows"],
         "cap": f"{step['data']['model']}, {step['data']['cap']}", "workload": tables.workload(step["data"])}
        for name, step in tables.of_kind(document, "ab") if step["data"]["rows"]
    ]  # fmt: skip


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
