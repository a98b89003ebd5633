"""Comparison of a plan with its baselines: predicted times beside each other, as text."""

from __future__ import annotations

from oallama.core.affinity import AffinityReport
from oallama.core.units import format_seconds
from oallama.report.table import WIDTH, Table, table
from oallama.report.text import rate_text


def compared(report: AffinityReport) -> list[tuple[str, ...]]:
    """(name, TTFT, TPOT, rate, whole run, its times the plan's) of the baselines, then of the plan."""
    plan = report.predicted
    rows = [*((one.name, one.predicted) for one in report.baselines), ("this plan", plan)]
    return [
        (
            name,
            format_seconds(one.ttft_s),
            format_seconds(one.tpot_s),
            rate_text(one.tpot_s),
            format_seconds(one.total_s),
            f"{one.total_s / plan.total_s:.2f}" if plan.total_s > 0 else "-",
        )
        for name, one in rows
    ]


def compared_title(report: AffinityReport) -> str:
    """Whether the plan was worth it, for which workload."""
    load = report.workload
    return "Was it worth it? Predicted" + (f" for {load.n_prompt:,} + {load.n_gen:,} tokens" if load else "")


def compared_table(report: AffinityReport) -> Table:
    """Was it worth it: the baselines beside the plan."""
    headings = "placement |>TTFT |>TPOT |>rate |>whole run |>times the plan's"
    return table(compared_title(report), headings, compared(report), width=WIDTH)
