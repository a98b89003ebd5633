"""Slices and streams of a plan, as sentences and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.affinity_report import Affinity
from oallama.core.types import StreamSettings
from oallama.core.units import format_bytes
from oallama.report.table import WIDTH, Table, table
from oallama.report.text import PLAIN, Words, plural, printable, ranges_text

MOST_LENGTHS = 6  # of the table of n_g that are shown

Shares = Sequence[float]
"""Fractions on the CPU, copied when needed, and on the card."""

TokenAssignment = Sequence[tuple[int, int]]


def ring_text(streamed_bytes: float, settings: StreamSettings | None, words: Words) -> str:
    """How much is copied to the card for a token; in the papers' words also how."""
    settings = settings or StreamSettings()
    what = (
        f"{format_bytes(round(streamed_bytes))} of weights are copied to the card for each token"
        if streamed_bytes
        else "weights are copied to the card only for prompts"
    )
    if words is PLAIN:
        return what
    how = "as soon as a slot is free" if settings.prefetch == "ahead" else "layer by layer"
    return f"{what}, {how}, through a ring of {plural(settings.n_slots, 'slot')}"


def tokens_text(table: TokenAssignment, settings: StreamSettings | None, words: Words) -> str:
    """The prompt length from which the card computes a part of the CPU's tokens; in the papers' words n_g of the
    longest lengths, and where it begins: `0 of 31, 9 of 32, 400 of 512`."""
    if words is PLAIN:
        first = min((n_tokens for n_tokens, n_g in table if n_g), default=0)
        return f"for prompts of {first}+ tokens the card takes part of the CPU's share"
    twice = ", CC twice in host memory" if settings is not None and settings.kept_twice else ""
    shown = table if len(table) <= MOST_LENGTHS else (*table[:2], *table[-(MOST_LENGTHS - 2) :])
    lengths = ", ".join(f"{n_g} of {n_tokens}" for n_tokens, n_g in shown)
    return f"prompt tokens whose CC the device also computes: {lengths}{twice}"


def percent_text(cut: Shares) -> str:
    """`50/30/20 %`."""
    return "/".join(f"{100 * share:.0f}" for share in cut) + " %"


def cut_text(row: Affinity) -> str:
    """`50/30/20 %`, or `32 of 128 experts` that are hot."""
    place = row.placement
    if n_hot := len(place.hot_experts):
        return f"{n_hot} of {row.shape[2]} experts"
    return percent_text((place.cc, place.cg, place.gg))


def slices_table(rows: Sequence[Affinity], words: Words) -> Table | None:
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
    footer = [words.means]
    if any(row.placement.hot_experts for row in rows):
        footer.append("Experts: the number of whole experts on the card, the most used; the CPU computes the others.")
    return table("Split operators", f"operator |type |>count |>bytes |>{words.cut} |layers", cells, footer, WIDTH)
