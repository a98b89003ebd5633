"""The report of `oallama what-if`: JSON document, table and chart. Everything in it is predicted."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from oallama.core.types import ModelInfo, Workload
from oallama.core.units import format_bytes, format_seconds
from oallama.place.problem import Decision
from oallama.place.record import n_gpu_layers
from oallama.place.what_if import WhatIf
from oallama.report.chart import OURS, STOCK, Group, Line, TimeBar, TimesChart
from oallama.report.table import WIDTH, Table, table
from oallama.report.text import model_title

CLAIM = "predicted from published rates of the cards, not measured"
LONGEST_TITLE = 46  # of the chart, characters of the model's name beside the legend


def what_if_document(model: ModelInfo, load: Workload, alone: Decision, rows: Sequence[WhatIf]) -> dict[str, Any]:
    """Seconds and bytes. `cpu` is this machine by itself."""
    return {
        "emulated": True,
        "source": CLAIM,
        "model": {"path": model.path, "arch": model.arch, "n_layer": model.n_layer, "file_bytes": model.file_bytes},
        "workload": {"n_prompt": load.n_prompt, "n_gen": load.n_gen, "n_ctx": load.n_ctx},
        "cpu": {"ttft_s": alone.predicted.ttft_s, "tpot_s": alone.predicted.tpot_s},
        "rows": [_row(model, row) for row in rows],
    }


def _row(model: ModelInfo, row: WhatIf) -> dict[str, Any]:
    stock, best = row.stock, row.best
    return {
        "gpu": row.card.name,
        "vram": row.card.memory_bytes,
        "policy": best.policy,
        "ttft_s": best.predicted.ttft_s,
        "tpot_s": best.predicted.tpot_s,
        "stock_ttft_s": stock.predicted.ttft_s,
        "stock_tpot_s": stock.predicted.tpot_s,
        "gain": row.gain,
        "fits_whole": row.fits_whole,
        "stock_n_gpu_layers": n_gpu_layers(model.n_layer, stock.placed),
        "stock_device_bytes": _used(stock),
        "device_bytes": _used(best),
        "description": row.card.description,
    }


def _used(decision: Decision) -> int:
    return decision.memory.limit - decision.memory.spare


def what_if_table(
    model: ModelInfo, load: Workload, alone: Decision, rows: Sequence[WhatIf], policy: str = "auto"
) -> Table:
    """At most WIDTH columns wide."""
    best = "best: of a quick search; where that is fit, nothing is predicted to be faster than stock."
    if policy != "auto":
        best = f"best: the plan of policy {policy}, faster than stock or not; where it does not fit, the CPU alone."
    fill = rows[0].stock.memory.fill
    cells = [
        (
            row.card.name,
            str(row.card.memory_bytes >> 30),
            _layers(model, row),
            format_seconds(row.stock.predicted.ttft_s),
            format_seconds(row.stock.predicted.tpot_s),
            format_seconds(row.best.predicted.ttft_s),
            format_seconds(row.best.predicted.tpot_s),
            f"{row.gain:.2f}×",
            row.best.policy,
        )
        for row in rows
    ]
    title = f"{model_title(model)}, {load.n_prompt} + {load.n_gen} tokens, context {load.n_ctx}:\n{CLAIM}"
    footer = (
        f"By itself this machine takes {format_seconds(alone.predicted.ttft_s)} to the first token (TTFT) and "
        f"{format_seconds(alone.predicted.tpot_s)} for each one more (TPOT). The cards are beside its CPU, with "
        f"{fill:.0%} of their memory, of which the best plans use {_range(rows)}. fit: stock llama.cpp's --fit, with "
        f"the -ngl that it chooses, of {model.n_layer + 1}. {best} `oallama plan` searches longer, on a card that is "
        "there."
    )
    headings = "card |>GiB |>ngl |>fit TTFT |>TPOT |>best TTFT |>TPOT |>gain |plan"
    return table(title, headings, cells, textwrap.wrap(footer, WIDTH))


def what_if_chart(model: ModelInfo, load: Workload, rows: Sequence[WhatIf]) -> TimesChart:
    """Bars by card, for stock llama.cpp and for our best plan."""
    title = model_title(model)
    cards = ", ".join(
        f"{row.card.name} {format_seconds(row.best.predicted.ttft_s)} and {format_seconds(row.best.predicted.tpot_s)}"
        for row in rows
    )
    return TimesChart(
        title=f"{title if len(title) <= LONGEST_TITLE else title[:LONGEST_TITLE] + '…'}: which card?",
        subtitle=f"{load.n_prompt} + {load.n_gen} tokens, context {load.n_ctx}; {CLAIM}",
        groups=(Group("", tuple(_chart_line(row) for row in rows)),),
        label=f"Times of {title} to the first token and for each one more, {CLAIM}: {cards}",
        legend=((STOCK, "stock --fit"), (OURS, "best plan")),
    )


def _chart_line(row: WhatIf) -> Line:
    def bar(seconds: float, colour: str) -> TimeBar:
        return TimeBar(seconds, colour, format_seconds(seconds))

    stock, best = row.stock.predicted, row.best.predicted
    first_token = (bar(stock.ttft_s, STOCK), bar(best.ttft_s, OURS))
    each_more = (bar(stock.tpot_s, STOCK), bar(best.tpot_s, OURS))
    return Line(row.card.name, (first_token, each_more), f"{row.card.memory_bytes >> 30} GiB")


def _layers(model: ModelInfo, row: WhatIf) -> str:
    return "all" if row.fits_whole else str(n_gpu_layers(model.n_layer, row.stock.placed))


def _range(rows: Sequence[WhatIf]) -> str:
    used = [_used(row.best) for row in rows]
    low, high = format_bytes(min(used)), format_bytes(max(used))
    return low if low == high else f"{low} to {high}"
