"""The chart of `oallama what-if`: bars by card for stock llama.cpp and for our best plan, as SVG, or as PNG where
matplotlib is."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from oallama.core.errors import UsageError
from oallama.core.types import ModelInfo, Workload
from oallama.core.units import format_seconds
from oallama.place.what_if import WhatIf
from oallama.report.text import model_title
from oallama.report.what_if import CLAIM

WIDTH, MARGIN = 920, 24
NAMES = 110  # pixels of the cards' names, left of the bars
PANEL = (WIDTH - 2 * MARGIN - NAMES) // 2
LABEL = 76  # of the figure behind the longest bar
TOP, ROW, BAR = 106, 44, 15
LONGEST_TITLE = 46  # characters of the model's name beside the legend

INK, GREY = "#1c2733", "#5b6875"
STOCK, OURS = "#9aa7b4", "#0b5cad"
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


def height(rows: Sequence[WhatIf]) -> int:
    return TOP + ROW * len(rows) + MARGIN


def shapes(model: ModelInfo, load: Workload, rows: Sequence[WhatIf]) -> Iterator[Shape]:
    """Two panels, TTFT and TPOT, each with a scale of its own."""
    title = model_title(model)
    yield Text(MARGIN, 32, f"{title if len(title) <= LONGEST_TITLE else title[:LONGEST_TITLE] + '…'}: which card?", 18)
    yield Text(MARGIN, 52, f"{load.n_prompt} + {load.n_gen} tokens, context {load.n_ctx}; {CLAIM}", 12, GREY)
    legend = WIDTH - MARGIN - 230
    yield from (Bar(legend, 22, 12, 12, STOCK), Text(legend + 18, 33, "stock --fit"))
    yield from (Bar(legend + 130, 22, 12, 12, OURS), Text(legend + 148, 33, "best plan"))
    for index, row in enumerate(rows):
        middle = TOP + ROW * index + BAR
        yield Text(MARGIN + NAMES - 12, middle + 1, row.card.name, to_the_left=True)
        yield Text(MARGIN + NAMES - 12, middle + 15, f"{row.card.memory_bytes >> 30} GiB", 11, GREY, to_the_left=True)
    panels = (
        ("time to the first token", [(r.stock.predicted.ttft_s, r.best.predicted.ttft_s) for r in rows]),
        ("time for each one more", [(r.stock.predicted.tpot_s, r.best.predicted.tpot_s) for r in rows]),
    )
    for number, (title, pairs) in enumerate(panels):
        left = MARGIN + NAMES + number * PANEL
        yield Text(left, TOP - 14, title, FONT, GREY)
        longest = max(max(pair) for pair in pairs)
        for index, pair in enumerate(pairs):
            for second, (seconds, colour) in enumerate(zip(pair, (STOCK, OURS), strict=True)):
                y = TOP + ROW * index + second * (BAR + 2)
                width = max(1.0, (PANEL - LABEL) * seconds / longest)
                yield Bar(left, y, width, BAR, colour)
                yield Text(left + width + 6, y + BAR - 3, format_seconds(seconds), 12)


def svg(model: ModelInfo, load: Workload, rows: Sequence[WhatIf]) -> str:
    """The chart as a file that needs nothing else."""
    high = height(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(_label(model, rows))}">',
        f'<rect width="{WIDTH}" height="{high}" fill="#ffffff"/>',
    ]
    for shape in shapes(model, load, rows):
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


def _label(model: ModelInfo, rows: Sequence[WhatIf]) -> str:
    cards = ", ".join(
        f"{row.card.name} {format_seconds(row.best.predicted.ttft_s)} and {format_seconds(row.best.predicted.tpot_s)}"
        for row in rows
    )
    return f"Times of {model_title(model)} to the first token and for each one more, {CLAIM}: {cards}"


def png(model: ModelInfo, load: Workload, rows: Sequence[WhatIf]) -> bytes:
    """The same picture in pixels. Raises UsageError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise UsageError(
            "a chart in PNG needs matplotlib: pip install 'oallama[plots]', or name an .svg file"
        ) from None
    high, dots_per_inch = height(rows), 100
    figure = Figure(figsize=(WIDTH / dots_per_inch, high / dots_per_inch), dpi=dots_per_inch)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(high, 0)
    axes.set_axis_off()
    for shape in shapes(model, load, rows):
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
