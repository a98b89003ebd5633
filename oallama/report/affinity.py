"""The affinity report for people: ranked operators, the memory ledger, how the iteration went, what is predicted."""

from __future__ import annotations

from dataclasses import replace

from oallama.core.types import Affinity, AffinityReport, MemoryLedger, Predicted
from oallama.core.units import MIB, format_bytes, format_seconds
from oallama.report.documents import AFFINITY_KEYS, affinity_csv_rows
from oallama.report.fold import Fold, fold
from oallama.report.table import Table, comma_separated, markdown, table
from oallama.report.text import model_title, percent, plural, printable, ranges_text, shape_text, three_digits

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
        rows = [_affinity_row(row) for row in report.operators]
        return table(_title(report), f">rank |{_AFFINITY_HEADINGS}", rows)
    folded = fold(report.operators)
    footer = (
        f"{plural(len(report.operators), 'operator')} in {plural(len(folded), 'line')}: bytes are sums, "
        "T_c, T_g, T' and µs/MiB medians of one operator; --all shows every operator.",
    )
    return table(_title(report), f">rank |>count |layers |{_AFFINITY_HEADINGS}", map(_fold_row, folded), footer)


def _title(report: AffinityReport) -> str:
    return f"GPU affinity of {model_title(report.model)} for {printable(report.device)}, {report.phase}"


def _affinity_row(row: Affinity) -> tuple[str, ...]:
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
        _span(*map(str, line.rank)),
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
        _span(*(f"{value:.2f}" for value in line.affinity)),
        line.backend,
    )


def _span(low: str, high: str) -> str:
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
    """One row per operator in rank order, the JSON's keys as headings, numbers with all their digits."""
    return comma_separated(AFFINITY_KEYS, affinity_csv_rows(report.operators))
