"""A matrix of measured comparisons as a table, and as a chart with a bar for each arm of each test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from oallama.core.units import format_seconds
from oallama.report.table import Table, table
from oallama_contrib.matrix.chart import OURS, STOCK, BarGroup, ChartLine, TimeBar, times_chart

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MeasuredTest:
    """The rows of one test of one cell, in the order of the arms.

    label: the options in which it differs from other cells. ratios: for each row how many times as fast as the fastest
    stock arm it is over the whole run, as text and as number.
    """

    label: Mapping[str, str]
    rows: tuple[Row, ...]
    ratios: tuple[tuple[str, float | None], ...]  # "" and None where there is no such figure


def matrix_table(about: str, tests: Sequence[MeasuredTest], missing: Iterable[str]) -> Table:
    """missing: a sentence for each cell without a result."""
    keys = list(dict.fromkeys(key for test in tests for key in test.label))
    rows = [
        (*(test.label.get(key, "") for key in keys), str(row["arm"]), _seconds(row["ttft_s"]), _seconds(row["tpot_s"]),
         _predicted(row), ratio, f"{row['device_bytes'] / 2**20:.0f}")
        for test in tests for row, (ratio, _) in zip(test.rows, test.ratios, strict=True)
    ]  # fmt: skip
    headings = "|".join([*keys, "arm", ">TTFT", ">TPOT", ">predicted", ">× stock (95 %)", ">device MiB"])
    return table(about, headings, rows, [*_totals(tests), *missing])


def matrix_chart(about: str, tests: Sequence[MeasuredTest]) -> str:
    """The picture as SVG: a group for each test of each cell, which has a scale of its own."""
    groups = tuple(
        BarGroup(
            ", ".join(test.label.values()),
            tuple(ChartLine(_label(row, test), (_bar(row, "ttft"), _bar(row, "tpot"))) for row in test.rows),
        )
        for test in tests
    )
    machines = dict.fromkeys(str(row["gpu_info"] or row["cpu_info"]) for test in tests for row in test.rows)
    return times_chart(about, f"{', '.join(machines)}; seconds, so shorter is better", groups)


def _label(row: Row, test: MeasuredTest) -> str:
    """An arm's name for readers."""
    arm = str(row["arm"])
    if arm.startswith("stock-"):
        return "llama.cpp, best" if arm == "stock-best" else f"llama.cpp --{arm.removeprefix('stock-')}"
    is_only = sum(not str(test_row["arm"]).startswith("stock-") for test_row in test.rows) == 1
    return "oallama" if is_only else f"oallama {arm}"


def _totals(tests: Sequence[MeasuredTest]) -> list[str]:
    """Least, greatest and mean ratio of each arm other than stock's."""
    ratios_by_arm: dict[str, list[float]] = {}
    for test in tests:
        for row, (_, ratio) in zip(test.rows, test.ratios, strict=True):
            if ratio is not None and not str(row["arm"]).startswith("stock"):
                ratios_by_arm.setdefault(str(row["arm"]), []).append(ratio)
    return [
        f"{arm}: {min(ratios):.2f} to {max(ratios):.2f} times as fast as the fastest stock arm, "
        f"{geometric_mean(ratios):.2f} in the geometric mean of {len(ratios)}"
        for arm, ratios in ratios_by_arm.items()
    ]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _predicted(row: Row) -> str:
    predicted = row["predicted"] or {}
    return ", ".join(format_seconds(predicted[key]) for key in ("ttft_s", "tpot_s") if predicted.get(key))


def _bar(row: Row, name: str) -> TimeBar:
    """The bar of `ttft` or `tpot`, with its ratio to the first arm."""
    seconds, ratio = row[f"{name}_s"], row[f"{name}_ratio_to_first"]
    times = f" ({ratio:.2f}×)" if ratio else ""
    colour = STOCK if str(row["arm"]).startswith("stock") else OURS
    return TimeBar(seconds, colour, f"{format_seconds(seconds or 0)}{times}")
