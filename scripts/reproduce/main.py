"""Every published figure of the papers beside what the simulator gives on the paper's testbed. Nothing is measured.

    python scripts/reproduce                 # simulates everything, writes JSON, page and picture (some minutes)
    python scripts/reproduce --only oato/    # only the figures whose paper/id contains it; the others stay as they are
    python scripts/reproduce --page          # nothing is simulated: page and picture again, with the texts of now

The figures are in scripts/reproduce/published/, a file a paper. No device, weights or network are needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shared import ROOT, InputError, guarded, parser_of, table

from reproduce.figures import Figure, papers
from reproduce.page import COLUMNS, cells_of, chart, page, ratio
from reproduce.problems import needed, run_all
from reproduce.quantities import find
from reproduce.texts import filled

DOCS = ROOT / "docs"
RESULTS = DOCS / "benchmarks" / "reproduction.json"
PAGE = DOCS / "reproduction.md"
PICTURE = DOCS / "pictures" / "reproduction.svg"

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input, 130 interrupted."""
    parser = parser_of("reproduce", __doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", metavar="TEXT", help="only simulate figures whose paper/id contains this")
    which.add_argument("--page", action="store_true", help="do not simulate")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: number of cores)")
    options = parser.parse_args(arguments)
    only = None if options.page else options.only or ""
    return guarded("reproduce", lambda: write(only, options.jobs), "nothing was written")


def write(only: str | None, jobs: int | None) -> int:
    """Simulate figures (None: none; "": all), and write everything. Returns the exit status. Raises InputError,
    OallamaError."""
    found = papers()
    figures = [figure for paper in found for figure in paper.figures]
    wanted = [figure for figure in figures if only is not None and only in figure.key]
    known = _known()
    if missing := {figure.key for figure in figures} - {figure.key for figure in wanted} - known.keys():
        raise InputError(f"{min(missing)} was never simulated: simulate it, or all figures")
    made = simulated(wanted, jobs)
    numbers = {**known, **made}
    rows = filled([row_of(figure, numbers[figure.key]) for figure in figures])
    if made:
        print("\n".join(table(COLUMNS, [cells_of(row) for row in rows if f"{row['paper']}/{row['id']}" in made])))
    document = {
        "what": "published figures and what the simulator gives; nothing was measured",
        "papers": [
            {"key": paper.key, "name": paper.name, "citation": paper.citation, "about": paper.about.strip()}
            for paper in found
        ],
        "figures": rows,
    }
    RESULTS.write_text(text_of(document), encoding="utf-8")
    PAGE.write_text(page(document), encoding="utf-8")
    PICTURE.write_text(chart(document), encoding="utf-8")
    return 0


def text_of(document: Mapping[str, Any]) -> str:
    """JSON with a line for each figure."""
    lines = [f'"{key}": {json.dumps(document[key], ensure_ascii=False)}' for key in ("what", "papers")]
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in document["figures"])
    return "{\n" + ",\n".join(lines) + f',\n"figures": [\n{rows}\n]\n}}\n'


def simulated(figures: Sequence[Figure], jobs: int | None) -> dict[str, Row]:
    """The numbers of figures, by key."""
    runs = run_all(needed(figures), jobs) if figures else {}
    return {figure.key: rounded(asdict(find(figure, runs))) for figure in figures}


def rounded(value: Any) -> Any:
    """Numbers to seven digits, which every machine agrees on."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


NUMBERS = ("ours", "bound", "lower", "variant", "cells")


def _known() -> dict[str, Row]:
    """The numbers that are in the JSON."""
    if not RESULTS.is_file():
        return {}
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]
    return {f"{row['paper']}/{row['id']}": {key: row[key] for key in NUMBERS} for row in rows}


def row_of(figure: Figure, numbers: Mapping[str, Any]) -> Row:
    """As the JSON has it."""
    row = {
        "paper": figure.paper, "id": figure.id, "place": figure.place, "what": figure.what, "unit": figure.unit,
        "kind": figure.kind, "at_least": figure.at_least, "published": figure.published, **numbers,
        "arms": {name: asdict(arm) for name in ("ours", "baseline", "variant")
                 if (arm := getattr(figure, name)) is not None},
        "echo": figure.echo, "again": figure.again, "holds": figure.holds,
        "assumed": figure.assumed, "why": figure.why, "beside": figure.beside,
    }  # fmt: skip
    return {**row, "ratio": ratio(row)}
