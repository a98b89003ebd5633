"""A plan in sentences: what is where, what it should cost, and its slices: r_CC, r_CG and r_GG, streaming, n_g."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from oallama.core.types import Operator, OperatorPlacement, PlanRecord, StreamSettings
from oallama.core.units import format_bytes
from oallama.cost.blocks import is_ffn
from oallama.report.affinity import predicted_text, printable_sentence
from oallama.report.text import percent, plural, printable

MOST_LENGTHS = 6  # of the table of n_g that are shown


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


def slice_sentences(record: PlanRecord, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Nothing for a plan that streams nothing."""
    by_name = {placement.name: placement for placement in record.operators}
    placed = [(operator, by_name[operator.name]) for operator in operators if operator.name in by_name]
    streamed = [(operator, placement) for operator, placement in placed if placement.cg > 0]
    if not streamed and not record.token_assignment:
        return ()
    settings, total = record.streaming or StreamSettings(), sum(p.cg * o.bytes for o, p in streamed)
    how = "as soon as a slot is free" if settings.prefetch == "ahead" else "layer by layer"
    what = f"streamed: {format_bytes(round(total))} of weights a token" if streamed else "streamed for prompts only"
    ring = f"{what}, copied {how} through a ring of {plural(settings.n_slots, 'slot')}"
    rates = "; ".join(_rates(placed))
    sentences = [ring, f"slices CC/CG/GG: {rates}"] if rates else [ring]
    if record.token_assignment:
        twice = ", CC kept in host memory twice" if settings.kept_twice else ""
        sentences.append(f"tokens of a prompt whose CC the device computes too: {_lengths(record)}{twice}")
    return tuple(sentences)


def _rates(placed: Sequence[tuple[Operator, OperatorPlacement]]) -> Iterator[str]:
    """`layers 0-3 50/30/20 %` for layers alike that follow one another, then the operators outside of layers."""
    by_layer: dict[int, set[tuple[float, float, float]]] = {}
    for operator, placement in placed:
        if operator.layer is not None and is_ffn(operator):
            by_layer.setdefault(operator.layer, set()).add((placement.cc, placement.cg, placement.gg))
    of_layer = [(layer, tuple(sorted(cuts))) for layer, cuts in sorted(by_layer.items())]
    for cuts, group in groupby(of_layer, key=lambda item: item[1]):
        layers = [layer for layer, _ in group]
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        yield f"{name} {' and '.join(_percent(cut) for cut in cuts)}"
    for operator, placement in placed:
        if operator.layer is None and placement.cg + placement.gg > 0:
            yield f"{printable(operator.role)} {_percent((placement.cc, placement.cg, placement.gg))}"


def _percent(cut: tuple[float, float, float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in cut) + " %"


def _lengths(record: PlanRecord) -> str:
    """`0 of 31, 9 of 32, 400 of 512`: the longest lengths, and where it begins."""
    table = record.token_assignment
    shown = table if len(table) <= MOST_LENGTHS else (*table[:2], *table[-(MOST_LENGTHS - 2) :])
    return ", ".join(f"{n_g} of {n_tokens}" for n_tokens, n_g in shown)
