"""Pictures of hot sets over the tokens: the share of uses that each way serves, simulated; what a token takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.pictures import CPU, DEVICE, GREY, LINK, panels

LOOK = {
    "hindsight": (GREY, ":", "best set of each stretch, in hindsight"),
    "static": (LINK, "-", "stays"),
    "lru": (DEVICE, "-", "LRU, each miss copied at once"),
    "learned": (CPU, "-", "learns, exchanged between requests"),
}


def courses(documents: Sequence[Mapping[str, Any]]) -> Any:
    """A panel for each document of learned.py."""
    figure, axes = panels(1, len(documents), (4.6 * len(documents), 3.7), layout="constrained", sharey=True)
    for axis, document in zip(axes[0], documents, strict=True):
        course = document["course"]
        n_stretch = course["n_stretch"]
        for way, (colour, line, label) in LOOK.items():
            y = document["ways"][way]["coverage"]
            x = [(i + 0.5) * n_stretch for i in range(len(y))]
            axis.plot(x, y, line, color=colour, linewidth=1.4, label=label)
        hot, n_expert = course["n_hot"], course["n_expert"]
        axis.set(xlabel="tokens", ylim=(0, 1), title=f"{hot} of {n_expert} experts hot, {document['n_used']} used")
        axis.axhline(hot / n_expert, color=GREY, linewidth=0.6)
    axes[0, 0].set_ylabel("share of uses that are hits")
    axes[0, len(documents) // 2].legend(frameon=False, fontsize=7, loc="lower right")
    return figure


def requests(series: Sequence[Sequence[Mapping[str, Any]]]) -> Any:
    """A line for each series of timed.py: milliseconds of a token, by request."""
    figure, axes = panels(1, 1, (6.4, 3.4), layout="constrained")
    axis = axes[0, 0]
    for one in series:
        colour, line, label = LOOK["learned" if one[0]["learns"] else "static"]
        axis.plot([r["tokens"] for r in one], [1e3 * r["tpot_s"] for r in one], line, color=colour, label=label)
    axis.set(xlabel="tokens", ylabel="ms a token, of each request")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure
