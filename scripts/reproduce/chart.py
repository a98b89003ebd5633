"""Published gains against simulated ones, log-log, a colour a paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oallama.report.chart import FONT, GREY, INK, WIDTH, Bar, Picture, Text

COLOURS = ("#0b5cad", "#c2571a", "#3f7d3a", "#7a4b94", "#9c2f3f", "#b08a00")
LEFT, TOP, SIDE = 90, 64, 560  # pixels: the square that is drawn in
MARK = 7
TICKS = (0.25, 0.5, 1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Point:
    """One figure."""

    paper: str
    published: float
    ours: float
    ruled_out: bool


@dataclass(frozen=True)
class Scatter(Picture):
    """A square of marks with a diagonal; a hollow mark is beyond the bound."""

    label: str
    points: Sequence[Point]
    papers: Sequence[str]

    @property
    def height(self) -> int:
        return TOP + SIDE + 60

    def shapes(self) -> Iterator[Bar | Text]:
        values = [value for point in self.points for value in (point.published, point.ours)] or [1.0]
        low, high = min(values) / 1.2, max(values) * 1.2

        def x_of(value: float) -> float:
            """0 to 1 along an axis."""
            return math.log(value / low) / math.log(high / low)

        yield Text(LEFT, 26, "Published against simulated: times as fast as the baseline", 16)
        yield Text(LEFT, 46, "each mark a figure of a paper; on the line both are the same", 12, GREY)
        yield Bar(LEFT, TOP + SIDE, SIDE, 1, INK)
        yield Bar(LEFT, TOP, 1, SIDE, INK)
        for tick in (tick for tick in TICKS if low <= tick <= high):
            x, y = LEFT + SIDE * x_of(tick), TOP + SIDE * (1 - x_of(tick))
            yield Bar(x, TOP, 1, SIDE, "#d6dde5")
            yield Bar(LEFT, y, SIDE, 1, "#d6dde5")
            yield Text(x - 6, TOP + SIDE + 18, f"{tick:g}", 12, GREY)
            yield Text(LEFT - 8, y + 4, f"{tick:g}", 12, GREY, ends_at_x=True)
        for step in range(SIDE // 6):
            yield Bar(LEFT + 6 * step, TOP + SIDE - 6 * step - 1.5, 3, 1.5, GREY)
        yield Text(LEFT + SIDE - 70, TOP + SIDE + 42, "simulated, ×", FONT, GREY)
        yield Text(LEFT - 70, TOP + SIDE + 42, "published, × (up)", FONT, GREY)
        for point in self.points:
            colour = COLOURS[self.papers.index(point.paper) % len(COLOURS)]
            x = LEFT + SIDE * x_of(point.ours) - MARK / 2
            y = TOP + SIDE * (1 - x_of(point.published)) - MARK / 2
            yield Bar(x, y, MARK, MARK, colour)
            if point.ruled_out:
                yield Bar(x + 2, y + 2, MARK - 4, MARK - 4, "#ffffff")
        for index, paper in enumerate(self.papers):
            y = TOP + 24 * index
            yield Bar(LEFT + SIDE + 40, y, 12, 12, COLOURS[index % len(COLOURS)])
            yield Text(LEFT + SIDE + 58, y + 11, paper)
        y = TOP + 24 * len(self.papers)
        yield Bar(LEFT + SIDE + 40, y, 12, 12, GREY)
        yield Bar(LEFT + SIDE + 43, y + 3, 6, 6, "#ffffff")
        yield Text(LEFT + SIDE + 58, y + 11, "beyond the bound")


def chart(document: Mapping[str, Any]) -> Scatter:
    """Of the gains in the results."""
    from reproduce.page import is_ruled_out

    names = {paper["key"]: paper["name"] for paper in document["papers"]}
    points = [
        Point(names[row["paper"]], row["published"], row["ours"], is_ruled_out(row))
        for row in document["figures"]
        if row["unit"] == "×" and row["ours"] and row["published"] and not row["at_least"]
    ]
    shown = [name for name in names.values() if any(point.paper == name for point in points)]
    assert WIDTH > LEFT + SIDE
    return Scatter("Published gains against simulated ones, by paper", points, shown)
