"""Weights on the device, slices and streams of a plan: as sums, sentences and a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from oallama.core.affinity_report import Affinity
from oallama.core.types import Operator, OperatorPlacement
from oallama.core.units import format_bytes
from oallama.device.spec import device_texts
from oallama.plan.plan import Plan
from oallama.report.table import Table, table
from oallama.report.text import CUT, CUT_MEANS, device_name, printable, ranges_text

Weights = Iterable[tuple[Operator | Affinity, OperatorPlacement]]


def weights_on_device(weights: Weights) -> tuple[int, int]:
    """(bytes of weights stored on the device, bytes of all of them). Hot experts are on the host too."""
    on_device, total = 0.0, 0
    for weight, placement in weights:
        on_device += placement.gg * weight.bytes + weight.bytes // weight.shape[2] * len(placement.hot_experts)
        total += weight.bytes
    return round(on_device), total


def streams_of(plan: Plan, weights: Weights) -> tuple[str, ...]:
    """Sentences on the weights that are copied to each device, and the prompts for which it takes more of them."""
    streamed: dict[int, float] = defaultdict(float)
    for weight, placement in weights:
        streamed[placement.device] += placement.cg * weight.bytes
    sentences: list[str] = []
    names = device_texts(plan.device)
    for number, settings in enumerate(plan.split_settings):
        name = f"{device_name(names[number])}: " if len(names) > 1 else ""
        if n_bytes := round(streamed[number]):
            sentences.append(f"{name}{format_bytes(n_bytes)} of weights are copied to the card for each token")
        elif settings.token_assignment:
            sentences.append(f"{name}weights are copied to the card only for prompts")
        if settings.token_assignment:
            least = min((n_tokens for n_tokens, n_g in settings.token_assignment if n_g), default=0)
            sentences.append(f"{name}for prompts of {least}+ tokens the card takes part of the CPU's share")
    return tuple(sentences)


def percent_text(cut: Sequence[float]) -> str:
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
    return table("Split operators", f"operator |type |>count |>bytes |>{CUT} |layers", cells, footer)
