"""Bars and lines of text as a picture: SVG that needs nothing else, or PNG where matplotlib is."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from oallama.core.errors import UsageError

INK, GREY = "#1c2733", "#5b6875"
STOCK, OURS = "#9aa7b4", "#0b5cad"  # of bars
FONT = 13


@dataclass(frozen=True, slots=True)
class Bar:
    """A filled rectangle, pixels from the top left."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Text:
    """One line that begins, or ends, at x; y is its baseline."""

    x: float
    y: float
    text: str
    size: float = FONT
    colour: str = INK
    to_the_left: bool = False


Shape = Bar | Text


def svg(shapes: Iterable[Shape], width: int, height: int, label: str) -> str:
    """The picture as a file. label: what it shows, for those who do not see it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(label)}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Bar):
            lines.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'fill="{shape.colour}"/>'
            )
        else:
            anchor = ' text-anchor="end"' if shape.to_the_left else ""
            lines.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.colour}"{anchor}>'
                f"{escape(shape.text)}</text>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def png(shapes: Iterable[Shape], width: int, height: int) -> bytes:
    """The same picture in pixels. Raises UsageError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise UsageError(
            "a chart in PNG needs matplotlib: pip install 'oallama[plots]', or name an .svg file"
        ) from None
    dots_per_inch = 100
    figure = Figure(figsize=(width / dots_per_inch, height / dots_per_inch), dpi=dots_per_inch)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    for shape in shapes:
        if isinstance(shape, Bar):
            axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, color=shape.colour, linewidth=0))
        else:
            axes.text(
                shape.x, shape.y, shape.text.replace("$", r"\$"), fontsize=shape.size * 72 / dots_per_inch,
                color=shape.colour, ha="right" if shape.to_the_left else "left", va="baseline",
            )  # fmt: skip
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()
