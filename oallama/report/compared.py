"""Comparison of plans with their baselines: predicted times beside each other, as text."""

from __future__ import annotations

from oallama.core.affinity import AffinityReport
from oallama.core.units import format_seconds
from oallama.report.table import WIDTH, Table, table
from oallama.report.text import rate_text


def compared(report: AffinityReport) -> list[tuple[str, ...]]:
    """(name, TTFT, TPOT, rate, whole run, its times that of the last row): baselines, the report's own plan, and last
    what `oallama run` uses, where that was asked for."""
    own = f"policy {report.policy}" if report.of_plan else "OATO's ranking alone"
    rows = [*((one.name, one.predicted) for one in report.baselines), (own, report.predicted)]
    if report.run is not None:
        if report.run.predicted == report.predicted:
            rows.pop()
        rows.append((f"what run uses: {report.run.policy}", report.run.predicted))
    last = rows[-1][1].total_s
    return [
        (
            name,
            format_seconds(one.ttft_s),
            format_seconds(one.tpot_s),
            rate_text(one.tpot_s),
            format_seconds(one.total_s),
            f"{one.total_s / last:.2f}" if last > 0 else "-",
        )
        for name, one in rows
    ]


def compared_title(report: AffinityReport) -> str:
    """What the times are of."""
    load = report.workload
    return "Was it worth it? Predicted" + (f" for {load.n_prompt:,} + {load.n_gen:,} tokens" if load else "")


def compared_table(report: AffinityReport) -> Table:
    """The baselines beside the plans."""
    headings = "placement |>TTFT |>TPOT |>rate |>whole run |>times the last"
    return table(compared_title(report), headings, compared(report), width=WIDTH)
