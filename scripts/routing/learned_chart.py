"""The picture of simulated courses of hot sets: what share of the uses each way serves, over the tokens."""

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
        hot, of = course["n_hot"], course["n_expert"]
        axis.set(xlabel="tokens", ylim=(0, 1), title=f"{hot} of {of} experts hot, {document['n_used']} used")
        axis.axhline(hot / of, color=GREY, linewidth=0.6)
    axes[0, 0].set_ylabel("share of uses that are hits")
    axes[0, len(documents) // 2].legend(frameon=False, fontsize=7, loc="lower right")
    return figure
