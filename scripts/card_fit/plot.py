"""Predicted against measured, as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import pictures
from experiments.inputs import InputError
from experiments.pictures import COLOURS, GREY

from card_fit.errors import PHASES, Row, median_error

NAMES = {"prompt": "prompt", "eval": "generation"}
MARKERS = ("o", "s", "^", "D", "v", "P")


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for the prompt and one for generation; models by colour, contexts by shape, filled where nothing was
    fitted to the row. Raises InputError."""
    if not pictures.is_there():
        raise InputError("--plot needs matplotlib: pip install 'oallama[plots]'")
    figure, axes = pictures.panels(1, 2, (11, 5.6), layout="constrained")
    models = list(dict.fromkeys(row["model"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    colours = {model: COLOURS[i % len(COLOURS)] for i, model in enumerate(models)}
    markers = {context: MARKERS[i % len(MARKERS)] for i, context in enumerate(contexts)}
    for axis, phase in zip(axes[0], PHASES, strict=True):
        pictures.diagonal(axis, [row[f"{phase}_tps{tail}"] for row in rows for tail in ("", "_predicted")])
        for row in rows:
            colour = colours[row["model"]]
            axis.plot(
                row[f"{phase}_tps"], row[f"{phase}_tps_predicted"], linestyle="", markersize=5, markeredgewidth=0.8,
                marker=markers[row["context"]], markeredgecolor=colour,
                markerfacecolor="none" if row["fitted"] else colour,
            )  # fmt: skip
        axis.set(aspect="equal", xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
        axis.set_title(f"{NAMES[phase]}: off by {median_error(rows, phase):.1%} in the median of all", fontsize=10)
        axis.grid(alpha=0.25)
    keys = [
        *(("o", colour, colour, model) for model, colour in colours.items()),
        *((marker, GREY, GREY, f"context {context}") for context, marker in markers.items()),
        ("o", GREY, "none", "fitted to"),
    ]
    for marker, colour, face, label in keys:
        axes[0, 0].plot([], [], linestyle="", marker=marker, color=colour, markerfacecolor=face, label=label)
    axes[0, 0].legend(fontsize=8, loc="upper left")
    pictures.write(figure, path)
