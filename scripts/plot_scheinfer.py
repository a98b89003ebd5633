#!/usr/bin/env python3
"""Draw docs/pictures/scheinfer.svg and scheinfer-streams.svg out of docs/benchmarks/scheinfer.json.

scripts/plot_scheinfer.py        # needs matplotlib: pip install 'oallama[plots]'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
PUBLISHED, PREDICTED = "#9db4cc", "#0b4f8a"
THREADS = {"2": "#c0392b", "4": "#d98c1f", "8": "#2a8f5b", "16": "#0b4f8a"}
STREAMS = {"copy": ("copy of CG", "#d98c1f"), "gpu": ("GPU: CG", "#2a8f5b"), "cpu": ("CPU: CC", "#0b4f8a")}


def curves(axis: Axes, document: dict[str, Any]) -> None:
    for row in document["rates"]:
        threads = str(row["threads"])
        points = document["sweep"][threads]
        axis.plot(
            [r for r, _ in points], [1e3 * s for _, s in points], color=THREADS[threads], label=f"{threads} threads"
        )
        axis.plot(row["solved_r_cg"], 1e3 * row["ffn_s"], "o", color=THREADS[threads])
        axis.axvline(row["published_r_cg"], color=THREADS[threads], linestyle=":", linewidth=1)
    axis.set(xlabel="$r_{CG}$", ylabel="FFN, ms", xlim=(0, 1), ylim=(0, 14))
    axis.set_title("LLaMA-2-70B, $r_{GG}$ = 0: solved (dots), published (dotted)", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def bars(axis: Axes, title: str, groups: list[str], published: list[float], predicted: list[float]) -> None:
    places = range(len(groups))
    axis.bar([x - 0.2 for x in places], published, 0.4, color=PUBLISHED, label="published")
    axis.bar([x + 0.2 for x in places], predicted, 0.4, color=PREDICTED, label="predicted")
    for shift, values in ((-0.2, published), (0.2, predicted)):
        for x, value in zip(places, values, strict=True):
            axis.annotate(
                f"{value:.3g}", (x + shift, value), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axis.axhline(1, color="#5b6b7f", linewidth=0.8)
    axis.set_xticks(list(places), groups, fontsize=8)
    axis.set_ylabel("speed-up")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def ablations(document: dict[str, Any]) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 7.2))
    curves(axes[0][0], document)
    means = document["fixed_means"]
    rates = [f"fixed {float(rate):g}" for rate in document["fixed"][0]["speed_up"]]
    bars(axes[0][1], "V-E2: solved $r_{CG}$ over a fixed one", rates, means["published"], means["by_fixed_rate"])
    axes[0][1].set_ylim(0, 2.8)
    memory, tokens = document["memory"]["16_threads"], document["tokens"]["16_threads"]
    pairs = (
        (axes[1][0], "V-E3: $r_{GG}$ assigned over whole layers", memory, "memory_gb", "GB"),
        (axes[1][1], "V-E4: tokens assigned over none", tokens, "n_tokens", ""),
    )
    for axis, title, rows, key, unit in pairs:
        groups = [f"{row['model'].split('-')[0]}\n{row[key]} {unit}" for row in rows]
        bars(
            axis,
            title,
            [group.strip() for group in groups],
            [row["published"] for row in rows],
            [row["predicted"] for row in rows],
        )
    axes[1][0].set_ylim(0, 1.8)
    axes[1][1].set(yscale="log", ylim=(0.8, 120), xlabel="tokens of the prompt")
    figure.tight_layout()
    save(figure, "scheinfer.svg")


def streams(document: dict[str, Any]) -> None:
    figure, axes = plt.subplots(2, 1, figsize=(9.6, 4.6), sharex=True)
    longest = max(run["seconds"] for run in document["streams"].values())
    titles = {"layer": "copies start with their layer (paper)", "continuous": "copies run ahead, ring of two slots"}
    for axis, (name, run) in zip(axes, document["streams"].items(), strict=True):
        for begin in [0.0, *run["layer_ends_s"][:-1]]:
            axis.barh(2.75, 1e3 * run["attention_s"], left=1e3 * begin, height=0.22, color="#9db4cc")
        for span in run["spans"]:
            line = list(STREAMS).index(span["stream"])
            left, right = max(0.0, span["start_s"]), min(span["end_s"], run["seconds"])
            shade = 1.0 if span["layer"] % 2 == 0 else 0.65
            axis.barh(2 - line, 1e3 * (right - left), left=1e3 * left, height=0.6, color=STREAMS[span["stream"]][1],
                      alpha=shade, edgecolor="white", linewidth=0.4)  # fmt: skip
        for end in run["layer_ends_s"]:
            axis.axvline(1e3 * end, color="#5b6b7f", linewidth=0.8, linestyle=":")
        axis.set_yticks([2.75, 2, 1, 0], ["GPU: attention", *(label for label, _ in STREAMS.values())], fontsize=8)
        axis.set_xlim(0, 1e3 * longest * 1.01)
        axis.set_title(
            f"{titles[name]}: $r_{{CG}}$ = {run['r_cg']:.3f}, three layers in {1e3 * run['seconds']:.2f} ms, "
            f"link busy {run['link_busy']:.0%}",
            fontsize=10,
        )
    axes[-1].set_xlabel("ms")
    figure.tight_layout()
    save(figure, "scheinfer-streams.svg")


def save(figure: plt.Figure, name: str) -> None:
    plt.rcParams["svg.hashsalt"] = "oallama"
    figure.savefig(DOCS / "pictures" / name, metadata={"Date": None})


def main() -> None:
    document = json.loads((DOCS / "benchmarks/scheinfer.json").read_text())
    ablations(document)
    streams(document)


if __name__ == "__main__":
    main()
