"""Sentences about a plan: placement, predicted times, split and streamed operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from oallama.core.types import Operator, OperatorPlacement, n_layer_of
from oallama.core.units import format_bytes
from oallama.cost.blocks import is_ffn
from oallama.device.spec import device_texts
from oallama.plan.plan import Plan
from oallama.plan.split import hot_bytes
from oallama.report.operators import predicted_text, printable_sentence, step_text, weights_text
from oallama.report.slices import percent_text, streams_of
from oallama.report.text import CUT, device_name, plural, policy_on, printable


def weights_on_device(record: Plan, operators: Sequence[Operator]) -> tuple[int, int]:
    """(bytes of operators' weights stored on the device, bytes of all of them). Hot experts are on the host too."""
    on_device = sum(p.gg * operator.bytes + hot_bytes(operator, p) for operator, p in record.pairs(operators))
    return round(on_device), sum(operator.bytes for operator in operators)


def where_text(record: Plan, operators: Sequence[Operator]) -> str:
    """Shares of the weights' bytes: `38%/62% CPU/GPU`, or `100% CPU`, `100% GPU` where everything is in one place."""
    device_bytes, all_bytes = weights_on_device(record, operators)
    if device_bytes <= 0:
        return "100% CPU"
    if device_bytes >= all_bytes:
        return "100% GPU"
    gpu = min(99, max(1, round(100 * device_bytes / all_bytes)))
    return f"{100 - gpu}%/{gpu}% CPU/GPU"


def plan_sentences(record: Plan, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Policy and placement, prediction, what is streamed, and the planner's notes."""
    on_device, total = weights_on_device(record, operators)
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
        *slice_sentences(record, operators),
        *notes,
    )


def device_sentences(record: Plan, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Sentences on each of several devices: its layers, slices, and used memory."""
    n_layer = n_layer_of(operators)
    ranges, sentences = layer_ranges(record, operators, n_layer), list[str]()
    with_slices = {row.device for row in record.operators if row.backend == "split"}
    devices = zip(device_texts(record.device), ranges, record.memory.devices, strict=False)
    for number, (device, (begin, end), memory) in enumerate(devices):
        blocks = layers_text(begin, min(end, n_layer)) if begin < min(end, n_layer) else ""
        output = "the output" if begin <= n_layer < end else ""
        contents = " and ".join(filter(None, [blocks, output, "slices" if number in with_slices else ""]))
        used_text = f"{format_bytes(memory.limit - memory.spare)} of {format_bytes(memory.limit)}"
        sentences.append(f"{device_name(device)}: {contents}, {used_text}")
    return tuple(sentences)


def layer_ranges(record: Plan, operators: Sequence[Operator], n_layer: int) -> list[tuple[int, int]]:
    """The layers [begin, end) that each of several devices has, the output being one behind the last; [] where there is
    one device."""
    return list(
        pairwise(accumulate(record.device_layers(operators, n_layer), initial=n_layer + 1 - record.n_gpu_layers))
    )


def layers_text(begin: int, end: int) -> str:
    """Layers [begin, end) that follow one another."""
    return f"layer {begin}" if end == begin + 1 else f"layers {begin}-{end - 1}"


def slice_sentences(record: Plan, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Empty for a plan without streams."""
    placed = record.pairs(operators)
    first_sentence, *other_sentences = streams_of(record, [(p.cg * o.bytes, p.device) for o, p in placed]) or ("",)
    if not first_sentence:
        return ()
    rates = "; ".join(_rates(placed))
    return (first_sentence, *([f"divided, {CUT}: {rates}"] if rates else []), *other_sentences)


def _rates(placed: Sequence[tuple[Operator, OperatorPlacement]]) -> Iterator[str]:
    """`layers 0-3 50/30/20 %` for consecutive equal layers, then the operators outside layers."""
    by_layer: dict[int, set[tuple[float, float, float, int]]] = {}
    for operator, placement in placed:
        if operator.layer is not None and is_ffn(operator):
            cut = (placement.cc, placement.cg, placement.gg, len(placement.hot_experts))
            by_layer.setdefault(operator.layer, set()).add(cut)
    of_layer = [(layer, tuple(sorted(cuts))) for layer, cuts in sorted(by_layer.items())]
    for cuts, group in groupby(of_layer, key=lambda item: item[1]):
        layers = [layer for layer, _ in group]
        name = layers_text(layers[0], layers[-1] + 1)
        texts = (plural(n_hot, "hot expert") if n_hot else percent_text(cut) for *cut, n_hot in cuts)
        yield f"{name} {' and '.join(texts)}"
    for operator, placement in placed:
        if operator.layer is None and placement.cg + placement.gg > 0:
            yield f"{printable(operator.role)} {percent_text((placement.cc, placement.cg, placement.gg))}"
