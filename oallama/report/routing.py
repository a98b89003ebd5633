"""The report of `oallama profile --routing`: how much of later traffic the most used experts serve."""

from __future__ import annotations

from statistics import median

from oallama.core.routing import Routing
from oallama.cost.experts import expert_use
from oallama.report.table import Table, table

SHARES = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "3/4": 3 / 4}
"""Of the experts of a layer, rounded down to whole ones."""


def routing_table(routing: Routing) -> Table:
    """Show the medians of the layers whose decode was recorded twice."""
    uses = expert_use(routing).values()
    counts = [int(share * routing.n_expert) for share in SHARES.values()]
    rows = [
        (phase, str(max((layer.n_tokens for layer in layers), default=0)), *(
            f"{median(use.coverage(n, n_tokens) for use in uses):.1%}" for n in counts
        ))
        for phase, n_tokens, layers in (("decode", 1, routing.decode), ("prompt", 2, routing.prompt)) if uses
    ]  # fmt: skip
    title = (
        f"Share of later traffic that the most used of {routing.n_expert} experts serve, {routing.n_expert_used} a "
        "token; median of the layers"
    )
    headings = " |".join(f">{name}" for name in SHARES)
    return table(title, f"phase |>tokens |{headings}", rows, width=80)
