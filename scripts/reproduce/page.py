"""docs/reproduction.md and its picture out of the results, within the text of page.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shared import table

from oallama.report.chart import FONT, GREY, INK, WIDTH, Bar, Text, svg

TEXT = Path(__file__).with_name("page.md")
FORMULAS_TEXT = Path(__file__).with_name("scheinfer.md")
"""What the solver made of ScheInfer's own formulas; a study that was made once."""

Row = Mapping[str, Any]

CLOSE = 0.15
"""By so much a published figure and ours may differ without a word."""

MANY = 12
"""Rows alike beyond which a table has their range alone."""

QUANTITY = re.compile(r"(?<=: ).*|on the [CG]PU")
"""What rows that are alike have in common, in the words of their figures."""

COLUMNS = ("where", "what", "published", "ours", "published / ours", "bound", "variant")
SAME, DIFFERS, RULED_OUT, HOLDS, FAILS, NOTHING = (
    "within 15 %", "differs", "beyond the bound", "holds", "does not hold", "no pair",
)  # fmt: skip
VERDICTS = (SAME, HOLDS, DIFFERS, RULED_OUT, FAILS, NOTHING)


def ratio(row: Row) -> float | None:
    """Published over ours."""
    published, ours = row["published"], row["ours"]
    return published / ours if published is not None and ours else None


def verdict(row: Row) -> str:
    """How a figure and ours stand to each other."""
    if row["ours"] is None or row["published"] is None:
        return NOTHING
    if row["at_least"]:
        return HOLDS if row["ours"] >= row["published"] else FAILS
    if is_ruled_out(row):
        return RULED_OUT
    return SAME if abs((ratio(row) or 0.0) - 1) <= CLOSE else DIFFERS


def is_ruled_out(row: Row) -> bool:
    """Whether the published figure is beyond the bound, by more than its own rounding."""
    bound, published = row["bound"], row["published"]
    if bound is None or published is None or row["at_least"]:
        return False
    return bool(published < 0.98 * bound if row["lower"] else published > 1.02 * bound)


def cells_of(row: Row) -> tuple[str, ...]:
    """A row of the page's tables."""
    sign = "≥ " if row["at_least"] else ""
    return (
        row["place"],
        row["what"],
        sign + _number(row["published"], row["unit"]),
        _number(row["ours"], row["unit"]),
        "" if row["at_least"] or row["ratio"] is None else f"{row['ratio']:.2f}",
        _number(row["bound"], row["unit"]),
        _number(row["variant"], row["unit"]),
    )


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "×":
        return f"{value:.2f}"
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return shown if unit == "of 1" else f"{shown} {unit}"


def page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    rows: Sequence[Row] = document["figures"]
    lines = [*_summary(document), ""]
    for paper in document["papers"]:
        own = [row for row in rows if row["paper"] == paper["key"]]
        lines += [f"## {paper['name']}", "", f"{paper['citation']}.", ""]
        if paper["about"]:
            lines += [*paper["about"].splitlines(), ""]
        if printed := list(_printed(own)):
            lines += table(COLUMNS, printed)
        lines += _sentences(own)
        if paper["key"] == "scheinfer":
            lines += [*FORMULAS_TEXT.read_text(encoding="utf-8").splitlines(), ""]
    return TEXT.read_text(encoding="utf-8").replace("<figures>", "\n".join(lines).rstrip())


def _printed(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A paper's rows that are counted and have a pair; many of one place and quantity as one row."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if verdict(row) != NOTHING and not (row["echo"] or row["again"]):
            found = QUANTITY.search(row["what"])
            groups.setdefault((row["place"], row["unit"], found[0] if found else ""), []).append(row)
    for (_, _, quantity), alike in groups.items():
        if len(alike) > MANY:
            yield _range_of(quantity, alike)
        else:
            yield from map(cells_of, alike)


def _range_of(quantity: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Least, median and most of rows that are alike."""
    unit = rows[0]["unit"]

    def between(values: list[float], unit: str) -> str:
        least, most = (_number(value, unit) for value in (min(values), max(values)))
        return f"{least} to {most}, median {_number(median(values), unit)}"

    columns = [between([row[key] for row in rows], unit) for key in ("published", "ours")]
    ratios = between([row["ratio"] for row in rows if row["ratio"] is not None], "×")
    what = f"{len(rows)} figures: {quantity}"
    return (rows[0]["place"], what, *columns, ratios, "", "")


def _summary(document: Mapping[str, Any]) -> list[str]:
    """How many figures of each paper stand how to ours, without those that are inputs of ours."""
    counted = [row for row in document["figures"] if not row["again"]]
    own = [row for row in counted if not row["echo"]]
    return [*_counts(document, own), "", ECHOES.format(len(counted) - len(own))]


ECHOES = "Not counted: the {} figures that are inputs of ours, or that an input was computed back from."


def _counts(document: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    made: list[tuple[object, ...]] = []
    for paper in document["papers"]:
        own = [row for row in rows if row["paper"] == paper["key"]]
        verdicts = [verdict(row) for row in own]
        off = [max(row["ratio"], 1 / row["ratio"]) for row in own if row["ratio"] and not row["at_least"]]
        counts = [verdicts.count(each) or "" for each in VERDICTS]
        made.append((paper["name"], len(own), *counts, f"{median(off):.2f}" if off else ""))
    return table(("paper", "figures", *VERDICTS, "median factor off"), made)[:-1]


SENTENCES = (("Assumed", "assumed", ()), ("Why they differ", "why", (SAME, HOLDS)), ("To know beside", "beside", ()))


def _sentences(rows: Sequence[Row]) -> list[str]:
    """What was assumed, and why figures differ: each sentence once, with the figures that it is about."""
    made: list[str] = []
    for heading, key, left_out in SENTENCES:
        verdicts: dict[str, list[str]] = {}
        for row in rows:
            if row[key] and verdict(row) not in left_out:
                verdicts.setdefault(row[key], []).append(row["what"])
        if verdicts:
            made += [f"**{heading}.**", ""]
            made += [f"- {_listed(whats)}: {sentence}" for sentence, whats in verdicts.items()]
            made += [""]
    return made


def _listed(whats: Sequence[str]) -> str:
    return "; ".join(whats) if len(whats) <= 3 else f"{whats[0]}, and {len(whats) - 1} more"


#
# the picture: published gains against simulated ones, log-log, a colour a paper
#

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


def _scatter(points: Sequence[Point], papers: Sequence[str]) -> Iterator[Bar | Text]:
    """A square of marks with a diagonal; a hollow mark is beyond the bound."""
    values = [value for point in points for value in (point.published, point.ours)] or [1.0]
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
    for point in points:
        colour = COLOURS[papers.index(point.paper) % len(COLOURS)]
        x = LEFT + SIDE * x_of(point.ours) - MARK / 2
        y = TOP + SIDE * (1 - x_of(point.published)) - MARK / 2
        yield Bar(x, y, MARK, MARK, colour)
        if point.ruled_out:
            yield Bar(x + 2, y + 2, MARK - 4, MARK - 4, "#ffffff")
    for index, paper in enumerate(papers):
        y = TOP + 24 * index
        yield Bar(LEFT + SIDE + 40, y, 12, 12, COLOURS[index % len(COLOURS)])
        yield Text(LEFT + SIDE + 58, y + 11, paper)
    y = TOP + 24 * len(papers)
    yield Bar(LEFT + SIDE + 40, y, 12, 12, GREY)
    yield Bar(LEFT + SIDE + 43, y + 3, 6, 6, "#ffffff")
    yield Text(LEFT + SIDE + 58, y + 11, "beyond the bound")


def chart(document: Mapping[str, Any]) -> str:
    """The picture of the gains in the results, as SVG."""
    names = {paper["key"]: paper["name"] for paper in document["papers"]}
    points = [
        Point(names[row["paper"]], row["published"], row["ours"], is_ruled_out(row))
        for row in document["figures"]
        if row["unit"] == "×" and row["ours"] and row["published"] and not (row["at_least"] or row["again"])
    ]
    shown = [name for name in names.values() if any(point.paper == name for point in points)]
    assert WIDTH > LEFT + SIDE
    return svg(TOP + SIDE + 60, "Published gains against simulated ones, by paper", _scatter(points, shown))
