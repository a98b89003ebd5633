"""The chart of a comparison: for each test a bar for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oallama.core.units import format_bytes, format_seconds
from oallama.report.chart import OURS, STOCK, Group, Line, TimeBar, TimesChart

Row = Mapping[str, Any]


def bench_chart(rows: Sequence[Row]) -> TimesChart:
    """rows: of bench/rows.py, tests in order. Each test has a scale of its own."""
    first = rows[0]
    groups: dict[str, list[Line]] = {}
    for row in rows:
        depth = f" at depth {row['n_depth']}" if row["n_depth"] else ""
        line = Line(str(row["arm"]), ((bar_of(row, "ttft"),), (bar_of(row, "tpot"),)))
        groups.setdefault(f"{row['n_prompt']} + {row['n_gen']}{depth}", []).append(line)
    return TimesChart(
        title=f"{first['model_type']}, {first['devices']}",
        subtitle=f"{first['gpu_info']}; {_cap(first)}; seconds, so shorter is better",
        groups=tuple(Group(test, tuple(lines)) for test, lines in groups.items()),
        label="; ".join(f"{row['arm']} {format_seconds(row['avg_ns'] * 1e-9)}" for row in rows),
    )


def bar_of(row: Row, name: str) -> TimeBar:
    """The bar of `ttft` or `tpot`, with its ratio to the first arm."""
    seconds, ratio = row[f"{name}_s"], row[f"{name}_ratio_to_first"]
    times = f" ({ratio:.2f}×)" if ratio else ""
    colour = STOCK if str(row["arm"]).startswith("stock") else OURS
    return TimeBar(seconds, colour, f"{format_seconds(seconds or 0)}{times}")


def _cap(row: Row) -> str:
    if row["cap_operator_bytes"]:
        return f"at most {format_bytes(row['cap_operator_bytes'])} of weights on the device"
    return f"at most {format_bytes(row['cap_device_bytes'])} on the device" if row["cap_device_bytes"] else "no device"
