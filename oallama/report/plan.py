"""Sentences about a plan: placement, predicted times, split and streamed operators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from oallama.core.types import Operator, n_layer_of
from oallama.core.units import format_bytes
from oallama.device.spec import device_texts
from oallama.plan.plan import Plan
from oallama.report.operators import predicted_text, printable_sentence, range_text, step_text, weights_text
from oallama.report.slices import streams_of, weights_on_device
from oallama.report.text import device_name, plural, policy_on


def plan_sentences(record: Plan, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Policy and placement, prediction, what is streamed, and the planner's notes."""
    on_device, total = weights_on_device(record.pairs(operators))
    n_whole, n_split = record.n_on("GPU"), record.n_on("split")
    shared = f", {n_split} split between it and the CPU" if n_split else ""
    placement_text = (
        f"{policy_on(record.policy, record.device)}: {weights_text(on_device, total)} and {n_whole} of "
        f"{plural(len(record.operators), 'operator')} on the device{shared}"
    )
    if not on_device and not n_split:
        placement_text = f"{policy_on(record.policy, record.device)}: all {format_bytes(total)} of weights on the CPU"
    times = (predicted_text(record.predicted),) if record.predicted else ()
    notes = (printable_sentence(note) for note in record.notes)
    step = filter(None, [step_text(record.workload.step, record.draft)])
    return (
        placement_text,
        *device_sentences(record, operators),
        *times,
        *step,
        *streams_of(record, record.pairs(operators)),
        *notes,
    )


def device_sentences(record: Plan, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Sentences on each of several devices: its layers, slices, and used memory."""
    n_layer = n_layer_of(operators)
    ranges, sentences = layer_ranges(record, operators, n_layer), list[str]()
    with_slices = {row.device for row in record.operators if row.backend == "split"}
    devices = zip(device_texts(record.device), ranges, record.memory.devices, strict=False)
    for number, (device, (begin, end), memory) in enumerate(devices):
        contents = f"layers {range_text(begin, end, n_layer)}{' and slices' if number in with_slices else ''}"
        used_text = f"{format_bytes(memory.limit - memory.spare)} of {format_bytes(memory.limit)}"
        sentences.append(f"{device_name(device)}: {contents}; {used_text} of memory")
    return tuple(sentences)


def layer_ranges(record: Plan, operators: Sequence[Operator], n_layer: int) -> list[tuple[int, int]]:
    """The layers [begin, end) that each of several devices has, the output being one behind the last; [] where there is
    one device."""
    return list(
        pairwise(accumulate(record.device_layers(operators, n_layer), initial=n_layer + 1 - record.n_gpu_layers))
    )
