"""Cells as bars: what each arm took to the first token, and for each one more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from oallama.core.units import format_seconds
from oallama.report.chart import OURS, STOCK, Group, Line, TimeBar, TimesChart


def chart(document: Mapping[str, Any], ids: Sequence[str]) -> TimesChart:
    """The cells of a report that have a result and are among `ids`."""
    cells = [cell for cell in document["cells"] if cell["id"] in ids and cell["rows"]]
    groups = tuple(
        Group(f"{cell['cap']}, {cell['workload']}", tuple(_line(row, cell["rows"][0]) for row in cell["rows"]))
        for cell in cells
    )
    models, devices = (", ".join(sorted({cell[key] for cell in cells})) for key in ("model", "device"))
    title = f"{models} on {document['machine'].get('device') or devices}"
    return TimesChart(title, "shorter is better; × as fast as the first arm, over the whole run", groups, title)


def _line(row: Mapping[str, Any], first: Mapping[str, Any]) -> Line:
    colour = STOCK if row["arm"].startswith("stock") else OURS
    bars = tuple(
        (TimeBar(seconds, colour, format_seconds(seconds)) if seconds else TimeBar(None, colour, ""),)
        for seconds in (mean(row[key]) if row[key] else None for key in ("samples_ttft_s", "samples_tpot_s"))
    )
    ratio = row.get("ratio_to_first")
    return Line(row["arm"], bars, "" if row is first or not ratio else f"{ratio:.2f} ×")
