"""Pictures of results as SVG, the same bytes each time. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, GREY, LIGHT = "#1c2733", "#5b6b7f", "#9db4cc"
COLOURS = ("#0b4f8a", "#c2571a", "#3f7d3a", "#7a4b94", "#9c2f3f", "#5b6b7f", "#b08a00")
DEVICE, LINK, CPU, JOIN = "#2a8f5b", "#d98c1f", "#0b4f8a", "#c0392b"
MISSING = "there is no matplotlib to draw with: pip install 'oallama[plots]'"


def is_there() -> bool:
    """Whether pictures can be drawn; sets matplotlib up."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "oallama"
    return True


def panels(n_rows: int, n_columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, an array [n_rows, n_columns]; size: of the whole figure in inches."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(n_rows, n_columns, figsize=size, squeeze=False, **options)
    return figure, axes


def svg(figure: Any) -> bytes:
    """The figure's picture; the figure is closed."""
    import matplotlib.pyplot as plt

    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    lines = out.getvalue().splitlines()
    return b"\n".join(line.rstrip() for line in lines) + b"\n"


def write(figure: Any, path: Path) -> None:
    path.write_bytes(svg(figure))


def diagonal(axis: Any, values: Iterable[float], log: bool = True) -> None:
    """Where two figures are equal, and within 10 % of it; `values` are those that both axes must show."""
    shown = list(values) or [1.0]
    low, high = (min(shown) / 1.3, 1.3 * max(shown)) if log else (0.0, 1.1 * max(shown))
    axis.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#cfe0f2", label="±10 %")
    axis.plot([low, high], [low, high], color=GREY, linewidth=1)
    axis.set(xlim=(low, high), ylim=(low, high))
    if log:
        axis.set(xscale="log", yscale="log")


def lanes(
    axis: Any,
    names: Sequence[str],
    spans: Iterable[tuple[str, float, float]],
    look: Mapping[str, tuple[str, str]],
    opacity: Sequence[float] | None = None,
) -> None:
    """What each stream did when. spans: (step, begin, end) in seconds; look: step -> (lane, colour), of those shown;
    opacity: of each span."""
    for index, (step, begin, end) in enumerate(spans):
        if step in look:
            lane, colour = look[step]
            axis.barh(names.index(lane), 1e3 * (end - begin), left=1e3 * begin, height=0.65, color=colour,
                      edgecolor="white", linewidth=0.4, alpha=opacity[index] if opacity else 1.0)  # fmt: skip
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)


def key(figure: Any, labels: Mapping[str, str], **options: Any) -> None:
    """A legend below the figure. labels: colour -> name."""
    import matplotlib.pyplot as plt

    shown = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in labels]
    options = {"loc": "lower center", "ncol": len(labels), "fontsize": 8, **options}
    figure.legend(shown, list(labels.values()), frameon=False, **options)
