"""A bar chart, as SVG, of the times to the first and per further token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oallama.report.svg import GREY, MARGIN, WIDTH, bar, svg, text

STOCK, OURS = "#9aa7b4", "#0b5cad"  # of bars

NAMES = 150  # pixels left of the bars
PANEL = (WIDTH - 2 * MARGIN - NAMES) // 2
FIGURE = 120  # behind the longest bar
TOP, GAP = 106, 46  # above the first group, between groups
BAR, LINE = 15, 26
PANELS = ("time to the first token", "time per further token")


@dataclass(frozen=True, slots=True)
class TimeBar:
    """A bar and the figure after it; no bar without seconds."""

    seconds: float | None
    colour: str
    text: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A name, and a bar in each of PANELS."""

    name: str
    bars: tuple[TimeBar, TimeBar]


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Lines whose bars share one scale in each panel."""

    label: str
    lines: tuple[ChartLine, ...]


def times_chart(title: str, subtitle: str, groups: Sequence[BarGroup]) -> str:
    """A chart of bars as SVG."""
    height = TOP + sum(LINE * len(group.lines) + GAP for group in groups)
    return svg(height, title, subtitle, _groups(groups))


def _groups(groups: Sequence[BarGroup]) -> Iterator[str]:
    y = TOP
    for group in groups:
        if group.label:
            yield text(MARGIN, y - 14, group.label, colour=GREY)
        for number, line in enumerate(group.lines):
            yield text(MARGIN + NAMES - 12, y + LINE * number + 13, line.name, ends_at_x=True)
        for number, panel in enumerate(PANELS):
            left = MARGIN + NAMES + number * PANEL
            yield text(left, y - 14, panel, colour=GREY)
            yield from _bars([line.bars[number] for line in group.lines], left, y)
        y += LINE * len(group.lines) + GAP


def _bars(bars: Sequence[TimeBar], left: int, top: int) -> Iterator[str]:
    longest = max((time_bar.seconds or 0.0 for time_bar in bars), default=0.0)
    for number, time_bar in enumerate(bars):
        if time_bar.seconds:
            y, width = top + LINE * number, max(1.0, (PANEL - FIGURE) * time_bar.seconds / longest)
            yield bar(left, y, width, BAR, time_bar.colour)
            yield text(left + width + 6, y + BAR - 3, time_bar.text, 12)
