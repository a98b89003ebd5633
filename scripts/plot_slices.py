#!/usr/bin/env python3
"""Draw docs/pictures/slices-*.svg out of what scripts/measure_slices.py wrote.

scripts/plot_slices.py streams docs/benchmarks/slices-streams.json   # slices-streams.svg
scripts/plot_slices.py random docs/benchmarks/slices-random.json     # slices-random.svg

Needs matplotlib: pip install 'oallama[plots]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

PICTURES = Path(__file__).parents[1] / "docs/pictures"
LINES = ("link", "device", "CPU", "joins")
MEASURED = {  # step: (line, colour)
    "copy": ("link", "#d98c1f"),
    "send": ("device", "#9db4cc"),
    "resident": ("device", "#2a8f5b"),
    "streamed": ("device", "#7fbf9f"),
    "fetch": ("device", "#9db4cc"),
    "launch": ("CPU", "#9db4cc"),
    "ahead": ("CPU", "#9db4cc"),
    "host": ("CPU", "#0b4f8a"),
    "join": ("joins", "#c0392b"),
}
PREDICTED = {
    "copy": ("link", "#d98c1f"),
    "gpu": ("device", "#2a8f5b"),
    "cpu": ("CPU", "#0b4f8a"),
    "join": ("joins", "#c0392b"),
}
NAMES = {"copy": "copy of CG and CG'", "resident": "GG", "streamed": "CG and CG'", "host": "CC",
         "launch": "launch, send, fetch", "join": "join"}  # fmt: skip
N_BLOCKS = 4


def streams(document: dict[str, Any]) -> None:
    """Four blocks out of the middle of a pass, as measured and as predicted, on one scale of time."""
    figure, axes = plt.subplots(4, 1, figsize=(9.6, 9.0))
    for row, (phase, title) in enumerate((("prompt", "a prompt"), ("decode", "one token"))):
        found = document[phase]
        measured, predicted = measured_blocks(found["measured"]), predicted_blocks(found["predicted"])
        longest = max(end for _, _, end in [*measured, *predicted])
        for axis, spans, colours, what, seconds in (
            (axes[2 * row], measured, MEASURED, "measured", found["seconds"]),
            (axes[2 * row + 1], predicted, PREDICTED, "predicted", found["predicted_seconds"]),
        ):
            draw(axis, spans, colours)
            axis.set_xlim(0, 1.01 * longest)
            busy = f", link busy {found['link_busy']:.0%}" if what == "measured" else ""
            axis.set_title(f"{title}, {what}: the whole pass {1e3 * seconds:.1f} ms{busy}", fontsize=10)
    axes[-1].set_xlabel("ms")
    shown = [plt.Rectangle((0, 0), 1, 1, color=MEASURED[step][1]) for step in NAMES]
    figure.legend(shown, NAMES.values(), ncol=len(NAMES), frameon=False, fontsize=8, loc="lower center")
    figure.suptitle(
        f"{document['model']}, $r_{{GG}}$ = {document['r_gg']:.2f}, $r_{{CG}}$ = {document['r_cg']:.2f}, "
        f"$n_g$ = {document['n_g']}, {document['machine']['device'].split('://')[0]}: four blocks", fontsize=11,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save(figure, "slices-streams.svg")


def measured_blocks(spans: list[list[Any]]) -> list[tuple[str, float, float]]:
    """(step, begin, end) in ms from the launch of the first of the blocks drawn."""
    launches = sorted(begin for step, name, begin, _, _ in spans if step == "launch" and "ffn" in name)
    first = min(len(launches) // 3, max(0, len(launches) - N_BLOCKS - 1))
    return between(
        [(s[0], s[2], s[3]) for s in spans], launches[first], launches[min(first + N_BLOCKS, len(launches) - 1)]
    )


def predicted_blocks(spans: list[list[Any]]) -> list[tuple[str, float, float]]:
    begins: dict[int, float] = {}
    for stream, block, begin, _ in spans:
        if stream != "copy":
            begins[block] = min(begin, begins.get(block, begin))
    blocks = sorted(begins)
    first = min(len(blocks) // 3, max(0, len(blocks) - N_BLOCKS - 1))
    begin, end = begins[blocks[first]], begins[blocks[min(first + N_BLOCKS, len(blocks) - 1)]]
    return between([(s[0], s[2], s[3]) for s in spans], begin, end)


def between(spans: list[tuple[str, float, float]], begin: float, end: float) -> list[tuple[str, float, float]]:
    inside = [(step, max(a, begin), min(b, end)) for step, a, b in spans if b > begin and a < end]
    return [(step, 1e3 * (a - begin), 1e3 * (b - begin)) for step, a, b in inside]


def draw(axis: Axes, spans: list[tuple[str, float, float]], colours: dict[str, tuple[str, str]]) -> None:
    for step, begin, end in spans:
        if step in colours:
            line, colour = colours[step]
            axis.barh(len(LINES) - 1 - LINES.index(line), end - begin, left=begin, height=0.6, color=colour,
                      edgecolor="white", linewidth=0.4)  # fmt: skip
    axis.set_yticks(range(len(LINES)), reversed(LINES), fontsize=8)
    axis.set_ylim(-0.5, len(LINES) - 0.5)


def scatter(document: dict[str, Any]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.4))
    for axis, phase in zip(axes, ("prompt", "decode"), strict=True):
        for label, colour, chosen in (
            ("nothing streamed", "#9db4cc", lambda row: row["r_cg"] == 0 and row["n_g"] == 0),
            ("CG streamed", "#d98c1f", lambda row: row["r_cg"] > 0 and row["n_g"] == 0),
            ("CG' too", "#0b4f8a", lambda row: row["n_g"] > 0),
        ):
            rows = [row[phase] for row in document["rows"] if chosen(row)]
            axis.plot([1e3 * r["predicted_s"] for r in rows], [1e3 * r["measured_s"] for r in rows], "o", ms=5,
                      color=colour, label=label)  # fmt: skip
        most = 1.1e3 * max(max(row[phase]["predicted_s"], row[phase]["measured_s"]) for row in document["rows"])
        axis.plot([0, most], [0, most], color="#5b6b7f", linewidth=0.8)
        axis.set(xlim=(0, most), ylim=(0, most), xlabel="predicted $t_{fin}$, ms", ylabel="measured $t_{fin}$, ms")
        axis.set_title(f"{phase}: median error {document['median_error'][phase]:.0%}", fontsize=10)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, "slices-random.svg")


def save(figure: plt.Figure, name: str) -> None:
    plt.rcParams["svg.hashsalt"] = "oallama"
    figure.savefig(PICTURES / name, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("streams", "random"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    (streams if args.what == "streams" else scatter)(json.loads(args.file.read_text()))


if __name__ == "__main__":
    main()
