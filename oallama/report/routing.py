"""The report of `oallama profile --routing`: how much of the traffic the most used experts serve, and whether a hot set
that was chosen on some traffic serves other traffic as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from oallama.core.routing import LayerRouting, Routing, RoutingPhase, Uses
from oallama.cost.experts import most_used
from oallama.report.table import Table, table

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
SHARE_NAMES = ("1/8", "1/4", "1/2", "3/4")
"""Of the experts of a layer, rounded down to whole ones."""

PHASES: tuple[RoutingPhase, ...] = ("decode", "prompt")


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer in one phase. Coverage: the share of all uses that the most used SHARES of the experts serve."""

    layer: int
    n_tokens: int
    coverage: tuple[float, ...]  # chosen and judged on the same window: no promise
    held_out: tuple[float, ...] | None  # chosen on what was known before the last recording, judged on that


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """A phase; of all layers the medians."""

    n_tokens: int  # of the layer that has seen the most
    coverage: tuple[float, ...]
    held_out: tuple[float, ...] | None
    layers: tuple[LayerFigures, ...]


@dataclass(frozen=True, slots=True)
class RoutingReport:
    n_expert: int
    n_expert_used: int
    shares: tuple[float, ...]
    decode: PhaseFigures | None  # None: nothing was counted
    prompt: PhaseFigures | None


def routing_report(routing: Routing) -> RoutingReport:
    phases = (_phase(routing, phase) for phase in PHASES)
    return RoutingReport(routing.n_expert, routing.n_expert_used, SHARES, *phases)


def coverage(chosen_on: Uses, judged_on: Uses, n_hot: int) -> float:
    """Share of the uses `judged_on` that the n_hot experts most used in `chosen_on` serve; of equals the first ones."""
    return sum(judged_on[expert] for expert in most_used(chosen_on)[:n_hot]) / sum(judged_on)


def _phase(routing: Routing, phase: RoutingPhase) -> PhaseFigures | None:
    layers = [_layer(routing, layer) for layer in routing.layers(phase) if layer.window > 0]
    if not layers:
        return None
    held_out = [layer.held_out for layer in layers if layer.held_out is not None]
    return PhaseFigures(
        max(layer.n_tokens for layer in layers),
        _medians([layer.coverage for layer in layers]),
        _medians(held_out) if held_out else None,
        tuple(layers),
    )


def _layer(routing: Routing, layer: LayerRouting) -> LayerFigures:
    counts = [int(share * routing.n_expert) for share in SHARES]
    judged = sum(layer.before) > 0 and sum(layer.latest) > 0
    return LayerFigures(
        layer.layer,
        layer.n_tokens,
        tuple(coverage(layer.uses, layer.uses, n) for n in counts),
        tuple(coverage(layer.before, layer.latest, n) for n in counts) if judged else None,
    )


def _medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*rows, strict=True))


def routing_tables(report: RoutingReport) -> tuple[Table, ...]:
    """Both phases with the medians of their layers; the layers of decode."""
    rows = []
    for phase, figures in zip(PHASES, (report.decode, report.prompt), strict=True):
        if figures is not None:
            rows.append((phase, "itself", f"{figures.n_tokens}", *_percent(figures.coverage)))
            if figures.held_out is not None:
                rows.append((phase, "later traffic", "", *_percent(figures.held_out)))
    title = (
        f"Share of the traffic that the most used of {report.n_expert} experts serve, {report.n_expert_used} a token; "
        "median of the layers"
    )
    headings = " |".join(f">{name}" for name in SHARE_NAMES)
    tables = [table(title, f"phase |judged on |>tokens |{headings}", rows, width=80)]
    if report.decode is not None:
        tables.append(table("Layers, decode", f"layer |>tokens |{headings} |>1/4 later", _rows(report.decode)))
    return tuple(tables)


def _rows(figures: PhaseFigures) -> Iterable[tuple[str, ...]]:
    for layer in figures.layers:
        later = "-" if layer.held_out is None else f"{layer.held_out[1]:.1%}"
        yield str(layer.layer), str(layer.n_tokens), *_percent(layer.coverage), later


def _percent(shares: Iterable[float]) -> tuple[str, ...]:
    return tuple(f"{share:.1%}" for share in shares)
