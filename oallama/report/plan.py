"""A plan in sentences: what is where, and what it should cost."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.types import Operator, PlanRecord
from oallama.core.units import format_bytes
from oallama.report.affinity import predicted_text, printable_sentence
from oallama.report.slices import slice_sentences
from oallama.report.text import percent, plural, printable


def weights_on_device(record: PlanRecord, operators: Sequence[Operator]) -> tuple[int, int]:
    """(bytes of operators' weights stored on the device, bytes of all of them)."""
    sizes = {operator.name: operator.bytes for operator in operators}
    on_device = sum(placement.gg * sizes.get(placement.name, 0) for placement in record.operators)
    return round(on_device), sum(sizes.values())


def processor_text(device_bytes: int, all_bytes: int) -> str:
    """`38%/62% CPU/GPU`, or `100% CPU`, `100% GPU` where everything is in one place."""
    if device_bytes <= 0:
        return "100% CPU"
    if device_bytes >= all_bytes:
        return "100% GPU"
    gpu = min(99, max(1, round(100 * device_bytes / all_bytes)))
    return f"{100 - gpu}%/{gpu}% CPU/GPU"


def plan_sentences(record: PlanRecord, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Policy and placement, prediction, what is streamed, and the planner's notes."""
    on_device, total = weights_on_device(record, operators)
    whole = sum(placement.gg == 1 for placement in record.operators)
    split = sum(0 < placement.gg < 1 or placement.cg > 0 for placement in record.operators)
    place = (
        f"{record.policy} on {printable(record.device)}: {format_bytes(on_device)} of {format_bytes(total)} of weights "
        f"({percent(on_device, total)}) and {whole} of {plural(len(record.operators), 'operator')} on the device"
        f"{f', {split} split between it and the CPU' if split else ''}"
    )
    times = (predicted_text(record.predicted),) if record.predicted else ()
    return (place, *times, *slice_sentences(record, operators), *(printable_sentence(note) for note in record.notes))
