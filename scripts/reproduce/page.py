"""docs/reproduction.md out of the results, within the text of page.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shared import table

from reproduce.formulas_page import formulas_lines

TEXT = Path(__file__).with_name("page.md")

Row = Mapping[str, Any]

CLOSE = 0.15
"""By so much a published figure and ours may differ without a word."""

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


def page(document: Mapping[str, Any], formulas: Mapping[str, Any]) -> str:
    """The whole page. formulas: ScheInfer's own, as docs/benchmarks/scheinfer.json has them."""
    rows: Sequence[Row] = document["figures"]
    lines = [*_summary(document), ""]
    for paper in document["papers"]:
        own = [row for row in rows if row["paper"] == paper["key"]]
        lines += [f"## {paper['name']}", "", f"{paper['citation']}.", ""]
        if paper["about"]:
            lines += [*paper["about"].splitlines(), ""]
        lines += table(COLUMNS, [cells_of(row) for row in own])
        lines += _sentences(own)
        if paper["key"] == "scheinfer":
            lines += formulas_lines(formulas)
    return TEXT.read_text(encoding="utf-8").replace("<figures>", "\n".join(lines).rstrip())


def _summary(document: Mapping[str, Any]) -> list[str]:
    """How many figures of each paper stand how to ours."""
    made: list[tuple[object, ...]] = []
    for paper in document["papers"]:
        own = [row for row in document["figures"] if row["paper"] == paper["key"]]
        verdicts = [verdict(row) for row in own]
        off = [max(row["ratio"], 1 / row["ratio"]) for row in own if row["ratio"] and not row["at_least"]]
        counts = [verdicts.count(each) or "" for each in VERDICTS]
        made.append((paper["name"], len(own), *counts, f"{median(off):.2f}" if off else ""))
    return table(("paper", "figures", *VERDICTS, "median factor off"), made)[:-1]


def _sentences(rows: Sequence[Row]) -> list[str]:
    """What was assumed, and why figures differ: each sentence once, with the figures that it is about."""
    made: list[str] = []
    for heading, key, left_out in (("Assumed", "assumed", ()), ("Why they differ", "why", (SAME, HOLDS))):
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
