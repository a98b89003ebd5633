"""Self-contained SVG pictures; bar charts of the times to the first and per further token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

INK, GREY = "#1c2733", "#5b6875"
STOCK, OURS = "#9aa7b4", "#0b5cad"  # of bars
FONT = 13

WIDTH, MARGIN = 920, 24  # pixels
NAMES = 150  # left of the bars
PANEL = (WIDTH - 2 * MARGIN - NAMES) // 2
FIGURE = 120  # behind the longest bar
TOP, GAP = 106, 46  # above the first group, between groups
BAR, BAR_STEP, LINE_GAP = 15, 17, 9
PANELS = ("time to the first token", "time per further token")


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
    """Text that begins, or ends, at x; y is its baseline."""

    x: float
    y: float
    text: str
    size: float = FONT
    colour: str = INK
    ends_at_x: bool = False


def svg(height: int, label: str, shapes: Iterable[Bar | Text]) -> str:
    """Draw shapes in order on white, WIDTH pixels wide. label: text for screen readers."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" role="img" aria-label="{escape(label)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Bar):
            lines.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'fill="{shape.colour}"/>'
            )
        else:
            anchor = ' text-anchor="end"' if shape.ends_at_x else ""
            lines.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.colour}"'
                f"{anchor}>{escape(shape.text)}</text>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class TimeBar:
    """A bar and the figure after it; no bar without seconds."""

    seconds: float | None
    colour: str
    text: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Bars under one name, the same number in each of PANELS."""

    name: str
    bars: tuple[tuple[TimeBar, ...], ...]
    remark: str = ""  # below the name

    @property
    def height(self) -> int:
        return len(self.bars[0]) * BAR_STEP + LINE_GAP


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Lines whose bars share one scale in each panel."""

    label: str
    lines: tuple[ChartLine, ...]


def times_chart(
    title: str, subtitle: str, groups: Sequence[BarGroup], label: str, legend: Sequence[tuple[str, str]] = ()
) -> str:
    """A chart of bars as SVG. label: as in svg; legend: (colour, meaning)."""
    height = TOP + sum(sum(line.height for line in group.lines) + GAP for group in groups)
    return svg(height, label, _times_shapes(title, subtitle, groups, legend))


def _times_shapes(
    title: str, subtitle: str, groups: Sequence[BarGroup], legend: Sequence[tuple[str, str]]
) -> Iterator[Bar | Text]:
    yield Text(MARGIN, 32, title, 18)
    yield Text(MARGIN, 52, subtitle, 12, GREY)
    for index, (colour, meaning) in enumerate(legend):
        x = WIDTH - MARGIN - 230 + 130 * index
        yield from (Bar(x, 22, 12, 12, colour), Text(x + 18, 33, meaning))
    y = TOP
    for group in groups:
        if group.label:
            yield Text(MARGIN, y - 14, group.label, colour=GREY)
        for number, panel in enumerate(PANELS):
            yield Text(MARGIN + NAMES + number * PANEL, y - 14, panel, colour=GREY)
        longest = [
            max((bar.seconds or 0.0 for line in group.lines for bar in line.bars[number]), default=0.0)
            for number in range(len(PANELS))
        ]
        for line in group.lines:
            yield Text(MARGIN + NAMES - 12, y + 13, line.name, ends_at_x=True)
            if line.remark:
                yield Text(MARGIN + NAMES - 12, y + 28, line.remark, 11, GREY, ends_at_x=True)
            for number, bars in enumerate(line.bars):
                yield from _bars(bars, MARGIN + NAMES + number * PANEL, y, longest[number])
            y += line.height
        y += GAP


def _bars(bars: Sequence[TimeBar], left: float, top: float, longest: float) -> Iterator[Bar | Text]:
    for index, bar in enumerate(bars):
        if not bar.seconds:
            continue
        y = top + index * BAR_STEP
        width = max(1.0, (PANEL - FIGURE) * bar.seconds / longest)
        yield Bar(left, y, width, BAR, bar.colour)
        yield Text(left + width + 6, y + BAR - 3, bar.text, 12)
