"""A bar chart, as SVG, of the times to the first and per further token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

INK, GREY = "#1c2733", "#5b6875"
STOCK, OURS = "#9aa7b4", "#0b5cad"  # of bars

WIDTH, MARGIN = 920, 24  # pixels
NAMES = 150  # left of the bars
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
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, 32, title, 18),
        _text(MARGIN, 52, subtitle, 12, GREY),
    )
    return "\n".join([*head, *_groups(groups), "</svg>"]) + "\n"


def _groups(groups: Sequence[BarGroup]) -> Iterator[str]:
    y = TOP
    for group in groups:
        if group.label:
            yield _text(MARGIN, y - 14, group.label, colour=GREY)
        for number, line in enumerate(group.lines):
            yield _text(MARGIN + NAMES - 12, y + LINE * number + 13, line.name, ends_at_x=True)
        for number, panel in enumerate(PANELS):
            left = MARGIN + NAMES + number * PANEL
            yield _text(left, y - 14, panel, colour=GREY)
            yield from _bars([line.bars[number] for line in group.lines], left, y)
        y += LINE * len(group.lines) + GAP


def _bars(bars: Sequence[TimeBar], left: int, top: int) -> Iterator[str]:
    longest = max((bar.seconds or 0.0 for bar in bars), default=0.0)
    for number, bar in enumerate(bars):
        if bar.seconds:
            y, width = top + LINE * number, max(1.0, (PANEL - FIGURE) * bar.seconds / longest)
            yield f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{bar.colour}"/>'
            yield _text(left + width + 6, y + BAR - 3, bar.text, 12)


def _text(x: float, y: int, text: str, size: int = 13, colour: str = INK, ends_at_x: bool = False) -> str:
    """Text that begins, or ends, at x; y is its baseline."""
    anchor = ' text-anchor="end"' if ends_at_x else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}"{anchor}>{escape(text)}</text>'
