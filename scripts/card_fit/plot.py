"""Predicted against measured, as SVG. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from card_fit.errors import PHASES, Row, median_error
from card_fit.tables import TableError

NAMES = {"prompt": "prompt", "eval": "generation"}
COLOURS = ("#0b4f8a", "#c2571a", "#3f7d3a", "#7a4b94")
MARKERS = ("o", "s", "^", "D", "v", "P")


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for the prompt and one for generation; models by colour, contexts by shape, filled where nothing was
    fitted to the row. Raises TableError."""
    try:
        import matplotlib
    except ImportError:
        raise TableError("--plot needs matplotlib: pip install 'oallama[plots]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "oallama"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5.6))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    models = list(dict.fromkeys(row["model"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    for axis, phase in zip(axes, PHASES, strict=True):
        values = [row[f"{phase}_tps{tail}"] for row in rows for tail in ("", "_predicted")]
        ends = [min(values) / 1.3, max(values) * 1.3]
        axis.plot(ends, ends, color="#1c2733", linewidth=1)
        axis.fill_between(
            ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#1c2733", alpha=0.1, linewidth=0
        )
        for row in rows:
            colour = COLOURS[models.index(row["model"]) % len(COLOURS)]
            axis.plot(
                row[f"{phase}_tps"], row[f"{phase}_tps_predicted"], linestyle="", markersize=5, markeredgewidth=0.8,
                marker=MARKERS[contexts.index(row["context"]) % len(MARKERS)], markeredgecolor=colour,
                markerfacecolor="none" if row["fitted"] else colour,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axis.set_xlabel("measured, tokens/s")
        axis.set_ylabel("predicted, tokens/s")
        axis.set_title(f"{NAMES[phase]}: off by {median_error(rows, phase):.1%} in the median of all", fontsize=10)
        axis.grid(alpha=0.25)
    keys = [
        pyplot.Line2D([], [], linestyle="", marker="o", color=COLOURS[i % len(COLOURS)], label=m)
        for i, m in enumerate(models)
    ]
    keys += [
        pyplot.Line2D([], [], linestyle="", marker=MARKERS[i % len(MARKERS)], color="#5b6b7f", label=f"context {c}")
        for i, c in enumerate(contexts)
    ]
    keys.append(
        pyplot.Line2D([], [], linestyle="", marker="o", color="#5b6b7f", markerfacecolor="none", label="fitted to")
    )
    axes[0].legend(handles=keys, fontsize=8, loc="upper left")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n", encoding="utf-8")
