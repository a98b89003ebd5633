#!/usr/bin/env python3
"""Tables of docs/benchmarks.md on matrices of policies, measured beside predicted: the winner of each cell, and why.

    scripts/policy_tables.py emulated-policies                                           # from what is kept
    scripts/policy_tables.py emulated-policies --keep build/ab/emulated-policies/report.json    # keep that first

NAME.json in docs/benchmarks is a report of scripts/ab without the place of each weight; NAME-predicted.json is what
`scripts/ab NAME.toml --simulate` writes. The tables go between the comments <!-- NAME --> and <!-- end of NAME -->; a
cell that is only predicted is shown as that.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.command import parser_of, write_document

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
STOCK = "stock-fit"
STREAMS = {"cpu": "CPU", "gpu": "card", "in": "link"}
Row = Mapping[str, Any]


@dataclass
class ArmRows:
    """One arm under one cap. predicted: as scripts/ab --simulate has it; rows: of `oallama bench`, each with the row of
    the stock arm that it was measured in turns with."""

    name: str
    predicted: Row | None = None
    rows: list[tuple[Row, Row]] = field(default_factory=list)

    @property
    def foretold(self) -> Row | None:
        """Predicted times; where the arm was not simulated, those that `oallama bench` planned by."""
        if self.predicted is not None:
            return None if self.predicted["error"] else self.predicted
        return next((row["predicted"] for row, _ in self.rows if row["predicted"]), None)

    @property
    def predicted_s(self) -> float | None:
        """Of the whole run."""
        return None if self.foretold is None else float(self.foretold["total_s"])

    def measured_s(self, key: str = "samples_ns", unit: float = 1e-9) -> float | None:
        """The median sample; none of an arm that did not do what it says."""
        samples = [sample for row, _ in self.rows if not row["problems"] for sample in row[key]]
        return unit * statistics.median(samples) if samples else None

    @property
    def against_stock(self) -> float | None:
        """Times as fast over the whole run, by medians."""
        pairs = [(row, stock) for row, stock in self.rows if not row["problems"] and not stock["problems"]]
        ratios = [statistics.median(s["samples_ns"]) / statistics.median(r["samples_ns"]) for r, s in pairs]
        return statistics.mean(ratios) if ratios else None


@dataclass
class Place:
    """A model under a cap, and its arms in the order of the matrix, stock's first."""

    model: str
    cap: str
    arms: dict[str, ArmRows] = field(default_factory=dict)

    def arm(self, name: str) -> ArmRows:
        return self.arms.setdefault(name, ArmRows(name))

    @property
    def foreseen(self) -> list[ArmRows]:
        """Arms by predicted time."""
        return sorted((arm for arm in self.arms.values() if arm.predicted_s), key=lambda arm: arm.predicted_s or 0.0)

    @property
    def fastest(self) -> list[ArmRows]:
        """Arms by measured time."""
        return sorted((arm for arm in self.arms.values() if arm.measured_s()), key=lambda arm: arm.measured_s() or 0.0)


def kept(name: str) -> dict[str, Any]:
    """What docs/benchmarks has under that name; no cells where there is no such file."""
    path = DOCS / "benchmarks" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": []}
    return found


def places(measured: Row, predicted: Row) -> list[Place]:
    """One for each model and cap, in the order in which they were simulated and measured."""
    found: dict[tuple[str, str], Place] = {}

    def place(cell: Row) -> Place:
        key = (cell["model"], cell["cap"])
        return found.setdefault(key, Place(*key, arms={STOCK: ArmRows(STOCK)}))

    for cell in predicted["cells"]:
        for row in cell["arms"]:
            place(cell).arm(row["arm"]).predicted = row
    for cell in measured["cells"]:
        stock = next((row for row in cell["rows"] if row["arm"] == STOCK), None)
        for row in cell["rows"]:
            if stock is not None and row["samples_ns"]:
                place(cell).arm(row["arm"]).rows.append((row, stock))
    return list(found.values())


def tables(measured: Row, predicted: Row, shares: bool = False) -> list[str]:
    """Lines of Markdown. shares: with a table of what is computed where."""
    found = places(measured, predicted)
    lines = [*_times(found), "", *_winners(found)]
    if shares:
        lines += ["", *_shares(found)]
    return [*lines, *_refused(found)]


def _times(found: Sequence[Place]) -> Iterator[str]:
    """Seconds of the whole run, a row for each policy; the least measured and the least predicted in bold."""
    names = list(dict.fromkeys(name for place in found for name in place.arms))
    yield "Seconds of the whole run, in brackets as predicted; the least in bold."
    yield ""
    yield from _head(["policy", *(f"{place.model}, {percent(place.cap)}" for place in found)])
    for name in names:
        yield _line([f"`{name}`", *(_time(place, name) for place in found)])


def _time(place: Place, name: str) -> str:
    arm = place.arms.get(name)
    if arm is None:
        return ""
    measured, predicted = arm.measured_s(), arm.predicted_s
    shown = _bold(f"{measured:.2f}", arm is place.fastest[0]) if measured else ""
    if predicted is None:
        return shown
    return f"{shown} ({_bold(f'{predicted:.2f}', arm is place.foreseen[0])})".strip()


def _winners(found: Sequence[Place]) -> Iterator[str]:
    """Who wins, and what holds it up."""
    yield from _head(["model", "predicted to win", "before", "by", "what is busy in its prompt, its token (predicted)",
                      "measured to win", f"× `{STOCK}`", "the predicted one ×"])  # fmt: skip
    for place in found:
        foreseen, fastest = place.foreseen, place.fastest
        cells = [f"{place.model}, {percent(place.cap)}"]
        if foreseen:
            first = foreseen[0]
            other = next((arm for arm in foreseen if not same_plan(arm, first)), first)
            ahead = (other.predicted_s or 0.0) / (first.predicted_s or 1.0) - 1
            names = _names(arm for arm in foreseen if same_plan(arm, first))
            cells += [names, f"`{other.name}`", percent(f"{ahead:.0%}"), _busy(first)]
        else:
            cells += ["-"] * 4
        cells += [f"`{fastest[0].name}`", _ratio(fastest[0])] if fastest else ["-"] * 2
        yield _line([*cells, _ratio(foreseen[0]) if foreseen else "-"])


def same_plan(arm: ArmRows, other: ArmRows) -> bool:
    """Whether two policies made one plan, to the last weight."""
    if arm is other:
        return True
    if arm.predicted is None or other.predicted is None:
        return False
    return bool(arm.predicted["places"] == other.predicted["places"])


def _shares(found: Sequence[Place]) -> Iterator[str]:
    """What of the weights each side multiplies with, and the times of prompt and token."""
    yield "Weights that the CPU computes (CC), the card after a copy (CG), the card from memory (GG); (p): predicted."
    yield ""
    yield from _head(["cap", "policy", "CC/CG/GG %", "CPU/card/link busy with a token, %", "TTFT ms", "(p)", "TPOT ms",
                      "(p)", f"whole run × `{STOCK}`"])  # fmt: skip
    for place in found:
        for arm in place.arms.values():
            foretold, plan = arm.foretold, arm.predicted if arm.predicted_s else None
            weights = "/".join(f"{100 * plan['weights'][side]:.0f}" for side in ("cc", "cg", "gg")) if plan else "-"
            busy = "/".join(f"{100 * plan['busy']['token'][stream]:.0f}" for stream in STREAMS) if plan else "-"
            yield _line([percent(place.cap), f"`{arm.name}`", weights, busy,
                         _ms(arm.measured_s("samples_ttft_s", 1.0)), _ms(foretold["ttft_s"] if foretold else None),
                         _ms(arm.measured_s("samples_tpot_s", 1.0)), _ms(foretold["tpot_s"] if foretold else None),
                         _ratio(arm)])  # fmt: skip


def _refused(found: Sequence[Place]) -> Iterator[str]:
    """Arms without a time, in a list."""
    why: dict[str, None] = {}
    for place in found:
        for arm in place.arms.values():
            problems = [problem for row, _ in arm.rows for problem in row["problems"]]
            error = arm.predicted["error"] if arm.predicted else ""
            for reason in filter(None, (error, *problems[:1])):
                why[f"- {place.model}, {percent(place.cap)}, `{arm.name}`: {reason}."] = None
    if why:
        yield ""
        yield from why


def _busy(arm: ArmRows) -> str:
    """`link 97 %; CPU 98 %`: the busiest streams of a prompt and of a token, those within a tenth of the time."""
    if arm.predicted is None:
        return "-"
    lines = []
    for phase in ("prompt", "token"):
        busy = arm.predicted["busy"][phase]
        most = max(busy[stream] for stream in STREAMS)
        lines.append(", ".join(f"{text} {busy[s]:.0%}" for s, text in STREAMS.items() if busy[s] >= most - 0.1))
    return percent("; ".join(lines))


def _names(arms: Iterable[ArmRows]) -> str:
    return " = ".join(f"`{arm.name}`" for arm in arms)


def _ratio(arm: ArmRows) -> str:
    value = arm.against_stock
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


def percent(text: str) -> str:
    """`25%` with the space that the page has before it."""
    return re.sub(r"(?<=\d)%", " %", text)


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _line(columns)
    yield f"|{'---|' * len(columns)}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def section(name: str) -> list[str]:
    """The lines between the comments of that name: which files there are, and their tables."""
    measured, predicted = kept(name), kept(f"{name}-predicted")
    files = [f"[{what}](benchmarks/{file}.json)" for what, file, document in (
        ("measured", name, measured), ("predicted", f"{name}-predicted", predicted)) if document["cells"]]  # fmt: skip
    if not files:
        return ["Neither measured nor predicted yet."]
    return [f"Raw: {', '.join(files)}.", "", *tables(measured, predicted, shares=name == "emulated-slow-cpu")]


def with_section(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with these lines between the comments. Raises ValueError for one without the comments."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs the comments {begin.strip()} and {end}, once each")
    before, rest = page.split(begin)
    return "".join((before, begin, "\n", *(f"{line}\n" for line in lines), "\n", end, rest.split(end)[1]))


def slim(report: Row) -> dict[str, Any]:
    """A report of scripts/ab without the place of each weight, folders, and what its tables repeat of the rows."""

    def row_of(row: Row) -> dict[str, Any]:
        return {key: Path(row[key]).name if key == "model_filename" else row[key] for key in row if key != "placement"}

    cells = [{**cell, "rows": [row_of(row) for row in cell["rows"]]} for cell in report["cells"]]
    return {**{key: report[key] for key in ("name", "about", "machine", "complete")}, "cells": cells}


def main() -> None:
    parser = parser_of("policy_tables.py", __doc__)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="REPORT.json", help="put this report into docs/benchmarks first")
    options = parser.parse_args()
    if options.keep is not None:
        report = slim(json.loads(options.keep.read_text(encoding="utf-8")))
        path = DOCS / "benchmarks" / f"{options.name}.json"
        write_document(report, path)
    page = with_section(PAGE.read_text(encoding="utf-8"), options.name, section(options.name))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
