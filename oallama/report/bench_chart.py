"""The picture of a comparison: for each test a bar for each arm, time to the first token and time for each one more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oallama.core.units import format_bytes, format_seconds
from oallama.report import drawing
from oallama.report.drawing import FONT, GREY, OURS, STOCK, Bar, Shape, Text

WIDTH, MARGIN = 920, 24
NAMES = 150  # pixels of the arms' names, left of the bars
PANEL = (WIDTH - 2 * MARGIN - NAMES) // 2
LABEL = 120  # of the figure behind the longest bar
TOP, ROW, GAP = 100, 24, 46  # of the first test, of an arm, between tests

Row = Mapping[str, Any]


def shapes(rows: Sequence[Row]) -> Iterator[Shape]:
    """rows: of bench/rows.py, tests in order. Each test has a scale of its own."""
    first = rows[0]
    yield Text(MARGIN, 32, f"{first['model_type']}, {first['devices']}", 18)
    yield Text(MARGIN, 52, f"{first['gpu_info']}; {_cap(first)}; seconds, so shorter is better", 12, GREY)
    y = TOP
    for label, group in _by_test(rows):
        yield Text(MARGIN, y - 10, label, FONT, GREY)
        for number, (title, name) in enumerate((("first token", "ttft"), ("each one more", "tpot"))):
            left = MARGIN + NAMES + number * PANEL
            yield Text(left, y - 10, title, FONT, GREY)
            longest = max((row[f"{name}_s"] or 0.0 for row in group), default=0.0)
            for index, row in enumerate(group):
                if row[f"{name}_s"]:
                    yield from _bar(row, name, left, y + index * ROW, longest)
        for index, row in enumerate(group):
            yield Text(MARGIN + NAMES - 12, y + index * ROW + 13, str(row["arm"]), to_the_left=True)
        y += len(group) * ROW + GAP


def height(rows: Sequence[Row]) -> int:
    return TOP + sum(len(group) * ROW + GAP for _, group in _by_test(rows))


def svg(rows: Sequence[Row]) -> str:
    """A file that needs nothing else."""
    label = "; ".join(f"{r['arm']} {format_seconds(r['avg_ns'] * 1e-9)}" for r in rows)
    return drawing.svg(shapes(rows), WIDTH, height(rows), label)


def png(rows: Sequence[Row]) -> bytes:
    """The same picture in pixels. Raises UsageError without matplotlib."""
    return drawing.png(shapes(rows), WIDTH, height(rows))


def _bar(row: Row, name: str, left: float, y: float, longest: float) -> Iterator[Shape]:
    seconds, ratio = row[f"{name}_s"], row[f"{name}_ratio_to_first"]
    width = max(1.0, (PANEL - LABEL) * seconds / longest)
    yield Bar(left, y, width, ROW - 8, STOCK if str(row["arm"]).startswith("stock") else OURS)
    times = f" ({ratio:.2f}×)" if ratio else ""
    yield Text(left + width + 6, y + 13, f"{format_seconds(seconds)}{times}", 12)


def _by_test(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        depth = f" at depth {row['n_depth']}" if row["n_depth"] else ""
        groups.setdefault(f"{row['n_prompt']} + {row['n_gen']}{depth}", []).append(row)
    return list(groups.items())


def _cap(row: Row) -> str:
    if row["cap_operator_bytes"]:
        return f"at most {format_bytes(row['cap_operator_bytes'])} of weights on the device"
    return f"at most {format_bytes(row['cap_device_bytes'])} on the device" if row["cap_device_bytes"] else "no device"
