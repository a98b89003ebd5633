"""Slices and streams of a plan, as sentences and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.affinity_report import Affinity
from oallama.core.units import format_bytes
from oallama.device.spec import device_texts
from oallama.plan.plan import Plan
from oallama.report.table import WIDTH, Table, table
from oallama.report.text import CUT, CUT_MEANS, device_name, printable, ranges_text

Shares = Sequence[float]
"""Fractions on the CPU, copied when needed, and on the card."""

TokenAssignment = Sequence[tuple[int, int]]


def ring_text(streamed_bytes: float) -> str:
    """A sentence with the bytes copied to the card per token."""
    if not streamed_bytes:
        return "weights are copied to the card only for prompts"
    return f"{format_bytes(round(streamed_bytes))} of weights are copied to the card for each token"


def streams_of(plan: Plan, streamed: Sequence[tuple[float, int]]) -> tuple[str, ...]:
    """Sentences on the copies to each device. streamed: (bytes of streamed weights, the device's number)."""
    sentences: list[str] = []
    names = device_texts(plan.device)
    for number, settings in enumerate(plan.split_settings):
        n_bytes = sum(n for n, device in streamed if device == number)
        ring = [ring_text(n_bytes)] if n_bytes or settings.token_assignment else []
        tokens = [tokens_text(settings.token_assignment)] if settings.token_assignment else []
        name = f"{device_name(names[number])}: " if len(names) > 1 else ""
        sentences += [f"{name}{text}" for text in (*ring, *tokens)]
    return tuple(sentences)


def tokens_text(table: TokenAssignment) -> str:
    """The prompt length from which the card computes a part of the CPU's tokens."""
    least_tokens = min((n_tokens for n_tokens, n_g in table if n_g), default=0)
    return f"for prompts of {least_tokens}+ tokens the card takes part of the CPU's share"


def percent_text(cut: Shares) -> str:
    """`50/30/20 %`."""
    return "/".join(f"{100 * share:.0f}" for share in cut) + " %"


def cut_text(row: Affinity) -> str:
    """`50/30/20 %`, or `32 of 128 experts` that are hot."""
    placement = row.placement
    if n_hot := len(placement.hot_experts):
        return f"{n_hot} of {row.shape[2]} experts"
    return percent_text((placement.cc, placement.cg, placement.gg))


def slices_table(rows: Sequence[Affinity]) -> Table | None:
    """Operators that are split or streamed, those with one role and one cut in a line; None if there are none."""
    groups: dict[tuple[str, str, str], list[Affinity]] = {}
    for row in sorted(rows, key=lambda row: (row.layer is None, row.layer, row.role)):
        if row.backend == "split":
            groups.setdefault((row.role, row.type, cut_text(row)), []).append(row)
    if not groups:
        return None
    cells = (
        (
            printable(role, 40), printable(kind), str(len(group)), format_bytes(sum(row.bytes for row in group)),
            cut, ranges_text([row.layer for row in group if row.layer is not None]) or "-",
        )
        for (role, kind, cut), group in groups.items()
    )  # fmt: skip
    footer = [CUT_MEANS]
    if any(row.placement.hot_experts for row in rows):
        footer.append("Experts: the number of whole experts on the card, the most used; the CPU computes the others.")
    return table("Split operators", f"operator |type |>count |>bytes |>{CUT} |layers", cells, footer, WIDTH)
