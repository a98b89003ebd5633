"""The chart of `oallama what-if`: bars by card for stock llama.cpp and for our best plan, as SVG, or as PNG where
matplotlib is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oallama.core.types import ModelInfo, Workload
from oallama.core.units import format_seconds
from oallama.place.what_if import WhatIf
from oallama.report import drawing
from oallama.report.drawing import FONT, GREY, OURS, STOCK, Bar, Shape, Text
from oallama.report.text import model_title
from oallama.report.what_if import CLAIM

WIDTH, MARGIN = 920, 24
NAMES = 110  # pixels of the cards' names, left of the bars
PANEL = (WIDTH - 2 * MARGIN - NAMES) // 2
LABEL = 76  # of the figure behind the longest bar
TOP, ROW, BAR = 106, 44, 15
LONGEST_TITLE = 46  # characters of the model's name beside the legend


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
    return drawing.svg(shapes(model, load, rows), WIDTH, height(rows), _label(model, rows))


def _label(model: ModelInfo, rows: Sequence[WhatIf]) -> str:
    cards = ", ".join(
        f"{row.card.name} {format_seconds(row.best.predicted.ttft_s)} and {format_seconds(row.best.predicted.tpot_s)}"
        for row in rows
    )
    return f"Times of {model_title(model)} to the first token and for each one more, {CLAIM}: {cards}"


def png(model: ModelInfo, load: Workload, rows: Sequence[WhatIf]) -> bytes:
    """The same picture in pixels. Raises UsageError without matplotlib."""
    return drawing.png(shapes(model, load, rows), WIDTH, height(rows))
