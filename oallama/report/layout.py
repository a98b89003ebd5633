"""Contents of the html page as records of finished text: map cells, memory breakdown bars, table rows. The template
only inserts them, so that all logic is here, where it is tested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oallama.core.affinity_report import Affinity
from oallama.core.types import MemoryBreakdown, ModelInfo
from oallama.core.units import MIB, format_bytes, format_seconds
from oallama.report.operators import (
    AffinityReport,
    affinity_text,
    memory_items,
    predicted_by,
    saved_text,
)
from oallama.report.slices import cut_text, weights_on_device
from oallama.report.text import (
    CUT,
    TIMES,
    device_name,
    percent,
    plural,
    printable,
    rate_text,
    shape_text,
    three_digits,
)

N_STEPS = 21
"""Of the colour scale (templates/scale.css): affinity is shown to the nearest 0.05."""

BAR_WIDTH = 1000
"""Width of a bar's drawing in its own units."""

# fmt: off
_ROLE_ORDER = (
    "attn_qkv", "attn_q", "attn_q_a", "attn_q_b", "attn_k", "attn_v", "attn_kv_a_mqa", "attn_kv_b", "attn_k_b",
    "attn_v_b", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps",
    "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate", "ffn_up", "ffn_down",
)
OPERATOR_HEADINGS = (
    "on", "rank", "operator", "type", "shape", "bytes", *(f"{name} µs" for name in TIMES), "saved µs", "µs/MiB",
    "affinity",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class MapMark:
    row_id: str  # of its row in the operator table
    letter: str  # G or C; S: both compute
    step: int  # of the colour scale
    label: str  # for people who cannot see the map


@dataclass(frozen=True, slots=True)
class MapRow:
    """A layer (or an operator outside the layers): marks by column; an empty tuple where the layer has no such role."""

    heading: str
    cells: tuple[tuple[MapMark, ...], ...]


@dataclass(frozen=True, slots=True)
class AffinityMap:
    """layer × role; `outside` are operators without a layer, one row each."""

    roles: tuple[str, ...]
    rows: tuple[MapRow, ...]
    outside: tuple[MapRow, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stacked bar; x and width in units of BAR_WIDTH."""

    kind: str  # names its colour
    name: str
    x: float
    width: float
    n_bytes: int
    share: str


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """A row of the operator table; `keys` are the sort keys of its cells."""

    row_id: str
    backend: str
    step: int
    cells: tuple[str, ...]
    keys: tuple[str, ...]


def step(value: float) -> int:
    """The index, 0..N_STEPS - 1, of the step of the colour scale that is nearest to an affinity."""
    return round(min(1.0, max(0.0, value)) * (N_STEPS - 1))


def role_order(role: str) -> tuple[int, str]:
    """Sort key: the order in which a block uses its weights; unknown roles last, by name."""
    return (_ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER), role)


def memories(
    device: str, memory: MemoryBreakdown, used: Sequence[str]
) -> list[tuple[str, MemoryBreakdown, tuple[Segment, ...]]]:
    """(device, its memory, its bar); used: the names of several devices, whose memory is in `devices`."""
    by_device = zip(map(device_name, used), memory.devices, strict=True) if memory.devices else [(device, memory)]
    return [(name, device_memory, memory_segments(device_memory)) for name, device_memory in by_device]


def affinity_map(rows: Sequence[Affinity], ranges: Sequence[tuple[int, int]] = ()) -> AffinityMap:
    def mark(row: Affinity) -> MapMark:
        where = f"on the {row.backend}"
        if row.backend == "split":
            where = f"{'' if row.placement.hot_experts else f'{CUT} '}{cut_text(row)}"
        gain = "saves no time there" if row.saved_s is None or row.saved_s <= 0 else f"affinity {row.affinity:.3f}"
        label = f"{printable(row.name)}: {where}, {gain}, rank {row.rank}"
        return MapMark(f"op-{row.rank}", row.backend[0].upper(), step(row.affinity), label)

    return arranged(((row.layer, row.role, mark(row)) for row in rows), ranges)


def arranged(marks: Iterable[tuple[int | None, str, MapMark]], ranges: Sequence[tuple[int, int]] = ()) -> AffinityMap:
    """Marks by layer and role. ranges: the layers [begin, end) of each of several devices, whose numbers are shown."""

    def heading(layer: int) -> str:
        number = next((str(n) for n, (begin, end) in enumerate(ranges) if begin <= layer < end), "-")
        return f"{layer} · {number}" if ranges else str(layer)

    inside: dict[tuple[int, str], list[MapMark]] = {}
    outside = []
    for layer, role, mark in marks:
        if layer is None:
            outside.append(MapRow(printable(role, 40), ((mark,),)))
        else:
            inside.setdefault((layer, role), []).append(mark)
    roles = sorted({role for _, role in inside}, key=role_order)
    layers = sorted({layer for layer, _ in inside})
    grid = tuple(
        MapRow(heading(layer), tuple(tuple(inside.get((layer, role), ())) for role in roles)) for layer in layers
    )
    return AffinityMap(tuple(printable(role, 40) for role in roles), grid, tuple(outside))


def operator_rows(rows: Sequence[Affinity], places: Mapping[str, str]) -> tuple[OperatorRow, ...]:
    """Every operator in rank order, cells as in OPERATOR_HEADINGS. places: as in AffinityReport."""
    shown_rows = []
    for row in rows:
        saved, benefit = row.saved_s, row.benefit_s_per_byte
        cells = (
            *(places[row.name], str(row.rank), printable(row.name), printable(row.type)),
            *(shape_text(row.shape), format_bytes(row.bytes)),
            *("-" if t is None else f"{t * 1e6:,.1f}" for t in (row.t_cpu_s, row.t_gpu_s, row.t_transfer_s)),
            *(saved_text(saved), "-" if benefit is None else three_digits(benefit * 1e6 * MIB)),
            affinity_text(row),
        )
        keys = (
            *(places[row.name], row.rank, *cells[2:4], row.shape[0] * row.shape[1] * row.shape[2], row.bytes),
            *(row.t_cpu_s, _or_last(row.t_gpu_s), row.t_transfer_s, _or_last(saved)),
            *(_or_last(benefit), row.affinity),
        )
        shown_rows.append(OperatorRow(f"op-{row.rank}", row.backend, step(row.affinity), cells, tuple(map(str, keys))))
    return tuple(shown_rows)


def _or_last(value: float | None) -> float:
    return float("-inf") if value is None else value


def memory_segments(memory: MemoryBreakdown) -> tuple[Segment, ...]:
    """The device's capacity as a stacked bar: the memory to be used, the spare up to the limit, and what is kept
    free."""
    held = [(name.split()[0].lower(), name, n_bytes) for name, n_bytes in memory_items(memory)]
    runtime = f", with {format_bytes(memory.runtime)} for the back end itself" if memory.runtime else ""
    kept = ("kept", f"kept free (fill {memory.fill:.4g}{runtime})", memory.capacity - memory.limit)
    return _segments([*held, kept])


def weight_segments(on_device: int, total: int) -> tuple[Segment, ...]:
    """The bytes of operators' weights by place, as a stacked bar."""
    return _segments((("weights", "on the device", on_device), ("host", "on the host", total - on_device)))


def _segments(parts: Sequence[tuple[str, str, int]]) -> tuple[Segment, ...]:
    total = sum(max(0, n_bytes) for _, _, n_bytes in parts)
    segments = []
    x = 0.0
    for kind, name, n_bytes in parts:
        width = BAR_WIDTH * max(0, n_bytes) / total if total else 0.0
        segments.append(Segment(kind, name, round(x, 2), round(width, 2), n_bytes, percent(n_bytes, total)))
        x += width
    return tuple(segments)


def tiles(report: AffinityReport) -> tuple[tuple[str, str, str], ...]:
    """The figures on top: (what, value, remark)."""
    plan, predicted = report.plan, predicted_by(report.plan)
    n_divided = plan.n_on("split")
    others = f", {n_divided} divided" if n_divided else ""
    on_device, total = weights_on_device(report.weights)
    rate = rate_text(predicted.tpot_s) if predicted.tpot_s > 0 else ""
    ended = "affinities stable" if report.converged else "cycle: least time kept"
    search = ("Policy", printable(plan.policy, 40), "of the plan")
    if not report.of_plan and report.run is None:
        search = ("Iterations", str(report.iterations), ended)
    return (
        ("Time to first token", format_seconds(predicted.ttft_s), "predicted"),
        ("Time per token", format_seconds(predicted.tpot_s), f"predicted, {rate}" if rate else "predicted"),
        ("Whole run", format_seconds(predicted.total_s), "predicted"),
        ("Weights on the device", percent(on_device, total), f"{format_bytes(on_device)} of {format_bytes(total)}"),
        ("Operators on the device", str(plan.n_on("GPU")), f"of {len(report.operators)}{others}"),
        search,
    )


def subtitle(model: ModelInfo, placement: str) -> str:
    """One line below the model's name. placement: what places it where."""
    experts = f" · {model.n_expert_used} of {plural(model.n_expert, 'expert')}" if model.n_expert else ""
    return (
        f"{printable(model.arch)} · {plural(model.n_layer, 'layer')}{experts} · {format_bytes(model.file_bytes)} · "
        f"{placement}"
    )
