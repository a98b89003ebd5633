#!/usr/bin/env python3
"""Draw docs/pictures/predicted.svg: predicted and measured times of random placements (benchmarks/predict.json).

scripts/plot_foundation.py        # needs matplotlib: pip install 'oallama[plots]'
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    document = json.loads((DOCS / "benchmarks/predict.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.9))
    for axis, key, title in zip(axes, ("ttft_s", "tpot_s"), ("time to first token", "time per token"), strict=True):
        rows = [row[key] for row in document["results"]]
        measured = [1e3 * row["measured"] for row in rows]
        predicted = [1e3 * row["predicted"] for row in rows]
        low, high = 0.9 * min(measured + predicted), 1.1 * max(measured + predicted)
        axis.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#cfe0f2", label="±10 %")
        axis.plot([low, high], [low, high], color="#5b6b7f", linewidth=1)
        axis.plot(measured, predicted, "o", color="#0b4f8a")
        axis.set(xlim=(low, high), ylim=(low, high), xlabel="measured, ms", ylabel="predicted, ms")
        axis.set_title(f"{title}: median error {document['summary'][key]['median_error']:.1%}", fontsize=11)
        axis.legend(loc="upper left", frameon=False)
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "oallama"
    figure.savefig(DOCS / "pictures/predicted.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
