"""The affinity report: ranked operators, the memory ledger, how the iteration went, what is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

from oallama.core.types import Affinity, AffinityReport, Backend, MemoryLedger, Predicted, Shape
from oallama.core.units import MIB, format_bytes, format_seconds
from oallama.report.inspect import model_document
from oallama.report.table import Table, comma_separated, markdown, table
from oallama.report.text import model_title, percent, plural, printable, ranges_text, shape_text, three_digits

AFFINITY_KEYS = tuple(f.name for f in fields(Affinity))
"""Of one operator in the JSON, and the columns of the CSV."""

FOLD_ABOVE = 40
"""Reports with more operators than this are folded to one line per role and backend unless every row is asked for."""

_LEGEND = "µs/MiB: what a MiB of device memory saves, (T_c - T_g - T') / bytes; affinity: that, scaled to 0..1."
_AFFINITY_HEADINGS = "operator |type |>shape |>bytes |>T_c µs |>T_g µs |>T' µs |>µs/MiB |>affinity |backend"


def benefit_text(benefit_s_per_byte: float | None) -> str:
    """The benefit B as people read it: microseconds saved per MiB of device memory spent; `-` where there is none."""
    return "-" if benefit_s_per_byte is None else three_digits(benefit_s_per_byte * 1e6 * MIB)


def microseconds_text(seconds: float | None) -> str:
    """A time in µs, one unit for a whole column; `-` for an operator that the device cannot compute."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def affinity_table(report: AffinityReport, every_row: bool = False) -> Table:
    """Operators in rank order; folded by role and backend when there are many and `every_row` is false."""
    if every_row or len(report.operators) <= FOLD_ABOVE:
        rows = [operator_cells(row) for row in report.operators]
        return table(_title(report), f">rank |{_AFFINITY_HEADINGS}", rows)
    folded = fold(report.operators)
    footer = (
        f"{plural(len(report.operators), 'operator')} in {plural(len(folded), 'line')}: bytes are sums, "
        "T_c, T_g, T' and µs/MiB medians of one operator; --all shows every operator.",
    )
    return table(_title(report), f">rank |>count |layers |{_AFFINITY_HEADINGS}", map(_fold_row, folded), footer)


def _title(report: AffinityReport) -> str:
    return f"GPU affinity of {model_title(report.model)} for {printable(report.device)}, {report.phase}"


def operator_cells(row: Affinity) -> tuple[str, ...]:
    """An operator as a row of text, in every table that lists operators one by one."""
    return (
        str(row.rank),
        printable(row.name),
        printable(row.type),
        shape_text(row.shape),
        format_bytes(row.bytes),
        microseconds_text(row.t_cpu_s),
        microseconds_text(row.t_gpu_s),
        microseconds_text(row.t_transfer_s),
        benefit_text(row.benefit_s_per_byte),
        f"{row.affinity:.3f}",
        row.backend,
    )


def _fold_row(line: Fold) -> tuple[str, ...]:
    return (
        span_text(*map(str, line.rank)),
        str(line.count),
        ranges_text(line.layers) or "-",
        printable(line.role),
        printable(line.type),
        shape_text(line.shape),
        format_bytes(line.bytes),
        microseconds_text(line.t_cpu_s),
        microseconds_text(line.t_gpu_s),
        microseconds_text(line.t_transfer_s),
        benefit_text(line.benefit_s_per_byte),
        span_text(*(f"{value:.2f}" for value in line.affinity)),
        line.backend,
    )


def span_text(low: str, high: str) -> str:
    """`low-high`; one of them where they are the same."""
    return low if low == high else f"{low}-{high}"


def convergence_text(report: AffinityReport) -> str:
    """How the iteration of ranks and T' ended, as a sentence."""
    steps = plural(report.iterations, "iteration")
    if report.converged:
        return f"The affinities were stable after {steps}."
    return f"The affinities ran in a cycle ({steps}); the plan of it with the least predicted time was kept."


def predicted_text(predicted: Predicted) -> str:
    """TTFT, TPOT and the total as a sentence."""
    rate = f" ({1 / predicted.tpot_s:.3g} tokens/s)" if predicted.tpot_s > 0 else ""
    return (
        f"Predicted: TTFT {format_seconds(predicted.ttft_s)}, TPOT {format_seconds(predicted.tpot_s)}{rate}, "
        f"total {format_seconds(predicted.total_s)}."
    )


def ledger_items(memory: MemoryLedger) -> tuple[tuple[str, int], ...]:
    """What the device will hold, (name, bytes); together with the spare they are the limit."""
    return (
        ("weights", memory.weights_gpu),
        ("KV cache", memory.kv),
        ("compute buffers", memory.compute),
        ("staging", memory.staging),
        ("spare", memory.spare),
    )


def ledger_table(memory: MemoryLedger, device: str) -> Table:
    """The ledger: items, their sum (the limit), what is kept back, and the capacity; then the weights on the host."""
    limit = f"= limit ({memory.fill:.4g} of the capacity)"
    entries = [
        *ledger_items(memory),
        (limit, memory.limit),
        ("kept free", memory.capacity - memory.limit),
        ("= capacity", memory.capacity),
    ]
    rows = [(name, f"{n_bytes / MIB:.2f}", str(n_bytes)) for name, n_bytes in entries]
    weights = memory.weights_gpu + memory.weights_host
    footer = (
        f"Weights: {format_bytes(memory.weights_gpu)} on the device "
        f"({percent(memory.weights_gpu, weights)}), {format_bytes(memory.weights_host)} on the host.",
    )
    return table(f"Memory of {printable(device)}", "item |>MiB |>bytes", rows, footer)


def report_tables(report: AffinityReport, every_row: bool = False) -> tuple[Table, ...]:
    """The whole report: ranked operators, then the ledger (where there is a device) with the sentences below it."""
    sentences = (
        _LEGEND,
        convergence_text(report),
        predicted_text(report.predicted),
        *map(printable_sentence, report.notes),
    )
    ranked = affinity_table(report, every_row)
    if report.memory.capacity <= 0:
        return (replace(ranked, footer=ranked.footer + sentences),)
    ledger = ledger_table(report.memory, report.device)
    return ranked, replace(ledger, footer=ledger.footer + sentences)


def printable_sentence(note: str) -> str:
    """A note as it may be shown; notes may quote names out of the model file."""
    return printable(note, 1000)


def affinity_markdown(report: AffinityReport, every_row: bool = False) -> str:
    """The report as Markdown."""
    return "\n".join(markdown(t) for t in report_tables(report, every_row))


def affinity_csv(report: AffinityReport) -> str:
    """One row per operator in rank order, the JSON's keys as headings, numbers with all their digits. A shape is
    `KxNxE`, what is missing is empty."""

    def cell(value: object) -> object:
        return "x".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else value

    rows = ([cell(getattr(row, key)) for key in AFFINITY_KEYS] for row in report.operators)
    return comma_separated(AFFINITY_KEYS, rows)


def report_document(report: AffinityReport) -> dict[str, Any]:
    """`oallama affinity-report --format json`: bytes and seconds; operators in rank order."""
    return asdict(report) | {"model": model_document(report.model)}


#
# operators that are alike, in one line
#


@dataclass(frozen=True, slots=True)
class Fold:
    """Operators of one role, type, shape and backend. Times are medians over them; spans are (least, greatest)."""

    role: str
    type: str
    shape: Shape
    backend: Backend
    layers: tuple[int, ...]  # ascending; empty for an operator outside blocks
    count: int
    bytes: int  # together
    t_cpu_s: float
    t_gpu_s: float | None  # None: the device cannot compute it
    t_transfer_s: float
    benefit_s_per_byte: float | None
    affinity: tuple[float, float]
    rank: tuple[int, int]


def fold(rows: Sequence[Affinity]) -> tuple[Fold, ...]:
    """One Fold per (role, type, shape, backend), in the order of their best rank."""
    groups: dict[tuple[str, str, Shape, Backend, bool], list[Affinity]] = {}
    for row in rows:
        groups.setdefault((row.role, row.type, row.shape, row.backend, row.layer is None), []).append(row)
    folds = (_fold(group) for group in groups.values())
    return tuple(sorted(folds, key=lambda f: (f.rank, f.role)))


def _fold(group: Sequence[Affinity]) -> Fold:
    first = group[0]
    affinities = [row.affinity for row in group]
    ranks = [row.rank for row in group]
    return Fold(
        role=first.role,
        type=first.type,
        shape=first.shape,
        backend=first.backend,
        layers=tuple(sorted(row.layer for row in group if row.layer is not None)),
        count=len(group),
        bytes=sum(row.bytes for row in group),
        t_cpu_s=median(row.t_cpu_s for row in group),
        t_gpu_s=_median(row.t_gpu_s for row in group),
        t_transfer_s=median(row.t_transfer_s for row in group),
        benefit_s_per_byte=_median(row.benefit_s_per_byte for row in group),
        affinity=(min(affinities), max(affinities)),
        rank=(min(ranks), max(ranks)),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
