"""The affinity report: ranked operators, the memory breakdown, the iterations, the predicted times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

from oallama.core.affinity_report import Affinity, Baseline, DeviceTimes, MeasuredOn
from oallama.core.codec import to_json
from oallama.core.types import (
    CPU_DEVICE,
    Backend,
    DecodeStep,
    Draft,
    MemoryBreakdown,
    ModelInfo,
    OperatorPlacement,
    Phase,
    Predicted,
    Shape,
)
from oallama.core.units import MIB, format_bytes, format_seconds
from oallama.plan.plan import Plan
from oallama.report.inspect import model_document
from oallama.report.slices import slices_table, streams_of, weights_on_device
from oallama.report.table import Table, table
from oallama.report.text import (
    TIMES,
    device_name,
    model_title,
    percent,
    plural,
    printable,
    ranges_text,
    rate_text,
    signed,
    three_digits,
)


@dataclass(frozen=True, slots=True)
class PlanInUse:
    """The plan that `oallama run` uses. measured: whether it won against stock llama.cpp here, or is only predicted
    to."""

    plan: Plan
    measured: bool


@dataclass(frozen=True, slots=True)
class AffinityReport:
    """`oallama affinity-report`: each operator's affinity, and a plan, which predicts its times."""

    model: ModelInfo
    device: str
    phase: Phase
    plan: Plan  # of OATO's search for the phase, or as was asked for
    operators: tuple[Affinity, ...]  # in rank order
    iterations: int
    converged: bool  # False: a cycle was detected and the best plan of it was kept
    baselines: tuple[Baseline, ...] = ()
    measured: MeasuredOn | None = None
    of_plan: bool = False  # the plan was asked for; else it is that of OATO's search for the phase
    run: PlanInUse | None = None  # None: not asked for
    devices: tuple[DeviceTimes, ...] = ()  # of several; (): there is one

    @property
    def weights(self) -> list[tuple[Affinity, OperatorPlacement]]:
        """Operators with their placements."""
        return [(row, row.placement) for row in self.operators]

    @property
    def places(self) -> dict[str, str]:
        """Where each operator is, by name; with several devices with the number, from 0, of its layer's device."""
        numbers = {layer: number for number, device in enumerate(self.devices) for layer in range(*device.layers)}
        first_used = next((number for number, device in enumerate(self.devices) if device.memory is not None), 0)

        def place(row: Affinity) -> str:
            layer = self.model.n_layer if row.layer is None else row.layer
            is_told = self.devices and row.backend != "CPU"
            # first_used: of slices of a host's layer
            return f"{row.backend} {numbers.get(layer, first_used)}" if is_told else row.backend

        return {row.name: place(row) for row in self.operators}


FOLD_ABOVE = 40
"""Reports with more operators than this have one line per role and backend, except with --all."""


def legend() -> str:
    """The sentence that explains the columns of times."""
    cpu, card, transfers = TIMES
    return (
        f"{cpu}, {card}, {transfers}, saved: µs per operator; saved: {cpu} - {card} - {transfers}; affinity: saved "
        "for each byte of the card's memory, scaled to 0..1."
    )


def with_plan_in_use(report: AffinityReport) -> AffinityReport:
    """The report with the plan that `oallama run` uses, and the same ranking."""
    run = report.run
    if run is None:
        return report
    places = {placement.name: placement for placement in run.plan.operators}
    rows = tuple(replace(row, placement=places[row.name]) for row in report.operators)
    return replace(report, plan=run.plan, operators=rows)


def ranked_places(report: AffinityReport) -> dict[str, Backend] | None:
    """Where OATO's ranking alone places operators, by name; None if the report shows that placement."""
    return {row.name: row.backend for row in report.operators} if report.run and not report.of_plan else None


def run_text(report: AffinityReport) -> str:
    """The sentence about the plan that `oallama run` uses; empty if not requested."""
    run = report.run
    if run is None:
        return ""
    if report.device == CPU_DEVICE:
        return (
            "`oallama run` uses only the CPU: no device was found. `--device emulated:rtx3060` emulates a GPU's "
            "timing; `oallama what-if` predicts other cards."
        )
    if run.measured:
        return f"`oallama run` uses policy {run.plan.policy}: it was compared with stock llama.cpp on this machine."
    if run.plan.policy == "fit":
        return "`oallama run` uses stock llama.cpp's own placement: nothing is predicted to be faster."
    return (
        f"`oallama run` will use policy {run.plan.policy} once `oallama tune` has confirmed that it is faster than "
        "stock llama.cpp."
    )


def order_text(report: AffinityReport) -> str:
    """A sentence on how the ranking relates to the placement in the report."""
    if report.plan.policy == "oato":
        return "Operators go to the device by rank, while they gain and fit."
    policy = printable(report.plan.policy)
    if not report.plan.n_on("split"):
        return f"The ranking is OATO's. Policy {policy} does not place operators by it."
    return (
        "The ranking is OATO's: whole operators go to the device by rank, and each figure assumes OATO's placement of "
        f"the neighbours. Policy {policy} also splits operators. A byte then saves a different time, so the first "
        "operators may be on the CPU."
    )


def affinity_text(row: Affinity | Fold) -> str:
    """The affinity, or the least and the greatest; `-` if the device saves no time."""
    if row.saved_s is None or row.saved_s <= 0:
        return "-"
    if isinstance(row, Affinity):
        return f"{row.affinity:.3f}"
    return "-".join(dict.fromkeys(f"{affinity:.2f}" for affinity in row.affinity))


def saved_text(seconds: float | None) -> str:
    """A saving in µs with its sign; `-` if unknown."""
    return "-" if seconds is None else signed(seconds * 1e6)


def zero_text(rows: Sequence[Affinity]) -> str:
    """The sentence about an operator that saves nothing (B = 0): its affinity, if it is on the scale."""
    benefits = [row.benefit_s_per_byte for row in rows if row.benefit_s_per_byte is not None]
    low, high = min(benefits, default=0.0), max(benefits, default=0.0)
    if low <= 0 < high:
        zero = -low / (high - low)
        return f"Affinity {zero:.2f} would mean that no time is saved; '-': slower on the card."
    return f"{'Every' if high > 0 else 'No'} operator saves time on the device."


def affinity_tables(report: AffinityReport, every_row: bool = False) -> tuple[Table, ...]:
    """Operators in rank order; many operators are folded by role and backend unless `every_row`, and a second table
    lists them."""
    run_report, ranked = with_plan_in_use(report), ranked_places(report)
    place_of = run_report.places
    places = ("run", "oato") if ranked else ("on",)
    place_headings, times = " |".join(places), " |".join(f">{name}" for name in (*TIMES, "saved", "affinity"))
    if every_row or len(report.operators) <= FOLD_ABOVE:
        rows = [
            (str(o.rank), printable(o.name), place_of[o.name], *([ranked[o.name]] if ranked else []), *_times(o),
             affinity_text(o))
            for o in run_report.operators
        ]  # fmt: skip
        return (table(_title(report), f">rank |operator |{place_headings} |{times}", rows),)
    folded = fold(run_report.operators, ranked, place_of)
    names_of = [
        (line.backend, *([line.ranked] if line.ranked else []), printable(line.role), printable(line.type))
        for line in folded
    ]
    numbers = (
        (*names, format_bytes(line.bytes), *_times(line), affinity_text(line))
        for names, line in zip(names_of, folded, strict=True)
    )
    lists = (
        (*names, str(line.count), ranges_text(line.layers) or "-", ranges_text(line.ranks))
        for names, line in zip(names_of, folded, strict=True)
    )
    footer = (_folded_text(report, folded),)
    return (
        table(_title(report), f"{place_headings} |operator |type |>bytes |{times}", numbers, footer),
        table("Which operators", f"{place_headings} |operator |type |>count |layers |ranks", lists),
    )


def _times(row: Affinity | Fold) -> tuple[str, ...]:
    times = (row.t_cpu_s, row.t_gpu_s, row.t_transfer_s)
    return (*("-" if t is None else three_digits(t * 1e6) for t in times), saved_text(row.saved_s))


def _folded_text(report: AffinityReport, folded: Sequence[Fold]) -> str:
    return (
        f"{plural(len(report.operators), 'operator')} in {plural(len(folded), 'line')}: bytes are sums, "
        "times medians of one operator in µs; --all shows every operator."
    )


def _title(report: AffinityReport) -> str:
    device = device_name(report.device) if report.devices else printable(report.device)
    return f"GPU affinity of {model_title(report.model)} for {device}, {report.phase}"


def convergence_text(report: AffinityReport) -> str:
    """A sentence on how the iterations of ranks and T' ended, or on the plan that is shown."""
    if report.of_plan:
        return f"The placement is that of policy {printable(report.plan.policy)}; the affinities assume it."
    steps = plural(report.iterations, "iteration")
    if report.converged:
        return f"The affinities were stable after {steps}."
    return f"The affinities repeated without settling ({steps}); the fastest plan among them was kept."


def predicted_by(plan: Plan) -> Predicted:
    """The prediction of a plan in a report, which always has one (placer/report.py)."""
    assert plan.predicted is not None
    return plan.predicted


def predicted_text(predicted: Predicted) -> str:
    rate = f" ({rate_text(predicted.tpot_s)})" if predicted.tpot_s > 0 else ""
    return (
        f"Predicted: TTFT {format_seconds(predicted.ttft_s)}, TPOT {format_seconds(predicted.tpot_s)}{rate}, "
        f"total {format_seconds(predicted.total_s)}."
    )


def step_text(step: DecodeStep, draft: Draft | None) -> str:
    """A sentence on a decode step's tokens, its yield, and the memory and time of drafts; empty for one token."""
    if step.n_tokens == 1:
        return ""
    requests = f" of {step.n_parallel} requests" if step.n_parallel > 1 else ""
    yields = f", and is expected to add {three_digits(step.n_yielded)} to each answer" if step.n_draft else ""
    draft_bytes = 0 if draft is None else draft.device_bytes or draft.host_bytes
    side = "device" if draft is not None and draft.device_bytes else "host"
    takes = f"; the draft model takes {format_bytes(draft_bytes)} of the {side}'s memory" if draft_bytes else ""
    return f"A decode step computes {step.n_tokens} tokens{requests}{yields}{takes}."


def measured_text(report: AffinityReport) -> str:
    """The sentence about the machine and date of the measurement; empty where unknown."""
    measured = report.measured
    if measured is None or not measured.cpu:
        return ""
    device = printable(report.device) + (f" ({printable(measured.device)})" if measured.device else "")
    device = device_name(report.device) if report.devices else device
    device_text = f" beside {device}" if report.plan.memory.capacity > 0 else ""
    return f"Measured on {printable(measured.cpu)}{device_text}" + (f", {measured.at[:10]}." if measured.at else ".")


def memory_items(memory: MemoryBreakdown) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the device's memory; with the spare they add up to the limit."""
    return (
        ("weights", memory.weights_gpu),
        ("KV cache", memory.kv),
        ("compute buffers", memory.compute),
        ("staging", memory.staging),
        ("spare", memory.spare),
    )


def weights_text(on_device: int, total: int) -> str:
    """`219 MiB of 557 MiB of weights (39%)`, as in every report."""
    return f"{format_bytes(on_device)} of {format_bytes(total)} of weights ({percent(on_device, total)})"


def memory_table(report: AffinityReport) -> Table:
    """The memory breakdown: items, their sum (the limit), what is kept back, and the capacity; then the operators'
    weights."""
    memory = report.plan.memory
    is_filled = memory.limit == int(memory.fill * memory.capacity)
    limit = f"= limit ({memory.fill:.4g} of the capacity)" if is_filled else "= limit (all but the runtime)"
    entries = [
        *memory_items(memory),
        (limit, memory.limit),
        ("kept free", memory.capacity - memory.limit - memory.runtime),
        *([("runtime of the back end", memory.runtime)] if memory.runtime else []),
        ("= capacity", memory.capacity),
    ]
    rows = [(name, f"{n_bytes / MIB:,.2f}", f"{n_bytes:,}") for name, n_bytes in entries]
    footer = (f"Operators: {weights_text(*weights_on_device(report.weights))} on the card.",)
    return table(f"Memory of {printable(report.device)}", "item |>MiB |>bytes", rows, footer)


def devices_table(report: AffinityReport) -> Table:
    """The layers and the memory of each of several devices; `-` where nothing is there."""
    items = ("weights", "KV cache", "compute", "staging", "spare", "limit")
    rows = []
    for number, device in enumerate(report.devices):
        sizes = ["-"] * len(items)
        if device.memory is not None:
            n_bytes = (*(size for _, size in memory_items(device.memory)), device.memory.limit)
            sizes = [f"{size / MIB:,.1f}" for size in n_bytes]
        rows.append(
            (f"{number}: {device_name(device.device)}", range_text(*device.layers, report.model.n_layer), *sizes)
        )
    footer = (f"Operators: {weights_text(*weights_on_device(report.weights))} on the cards.",)
    headings = " |>".join(("device |layers", *items))
    return table("Devices: layers, and memory in MiB", headings, rows, footer)


def range_text(begin: int, end: int, n_layer: int) -> str:
    """Layers [begin, end), the output being the one behind the last: `4-11, output`."""
    blocks = ranges_text(tuple(range(begin, min(end, n_layer))))
    return ", ".join(filter(None, [blocks, "output" if begin <= n_layer < end else ""])) or "-"


def times_by_device(report: AffinityReport) -> Table:
    """Times of equal operators on each of several devices, side by side: T_c, then T_g, T' and what is saved on each,
    in µs, medians of operators alike."""
    rows = []
    for line in fold(report.operators, places=dict.fromkeys(report.places, "")):
        alike = [
            row for row in report.operators if (row.role, row.type, row.shape) == (line.role, line.type, line.shape)
        ]
        cells = [printable(line.role), printable(line.type), three_digits(line.t_cpu_s * 1e6)]
        for device in report.devices:
            on_device = [device.rows[row.name] for row in alike]
            t_gpu_s = _median(row.t_gpu_s for row in on_device)
            t_transfer_s = median(row.t_transfer_s for row in on_device)
            cells += ["-" if t_gpu_s is None else three_digits(t_gpu_s * 1e6), three_digits(t_transfer_s * 1e6)]
            cells.append(saved_text(_median(row.saved_s for row in on_device)))
        rows.append(cells)
    cpu, card, transfers = TIMES
    columns = "".join(f" |>{card} {n} |>{transfers} {n} |>saved {n}" for n in range(len(report.devices)))
    return table("Times by device", f"operator |type |>{cpu}{columns}", rows)


def report_tables(report: AffinityReport, every_row: bool = False) -> tuple[Table, ...]:
    """The whole report: ranked operators, the memory breakdown if there is a device, and the comparison with baselines,
    with notes below it."""
    run_report = with_plan_in_use(report)
    sentences = (
        legend(),
        zero_text(report.operators),
        convergence_text(report),
        *filter(None, [run_text(report)]),
        predicted_text(predicted_by(run_report.plan)),
        *filter(None, [measured_text(report)]),
        *streaming_sentences(run_report),
        *map(printable_sentence, run_report.plan.notes),
    )
    ranked = (*affinity_tables(report, every_row), *filter(None, [slices_table(run_report.operators)]))
    memory_breakdown = [memory_table(run_report)] if run_report.plan.memory.capacity > 0 else []
    if run_report.devices:
        memory_breakdown = [times_by_device(run_report), devices_table(run_report)]
    tables = (*ranked, *memory_breakdown, *([compared_table(report)] if report.baselines else []))
    return (*tables[:-1], replace(tables[-1], footer=tables[-1].footer + sentences))


def streaming_sentences(report: AffinityReport) -> tuple[str, ...]:
    """Sentences about the decode step, streamed weights, and the tokens that they are streamed for."""
    plan = report.plan
    streams = streams_of(plan, report.weights)
    step = step_text(plan.workload.step, plan.draft)
    return (*filter(None, [step]), *(f"{text[0].upper()}{text[1:]}." for text in streams))


def printable_sentence(note: str) -> str:
    """A note with control characters escaped; notes may quote names from the model file."""
    return printable(note, 1000)


def _operator_document(row: Affinity) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "placement"}
    shares = {name: getattr(row.placement, name) for name in ("backend", "gg", "cg", "cc")}
    return {**values, **shares, "n_hot": len(row.placement.hot_experts)}


def report_document(report: AffinityReport) -> dict[str, Any]:
    """`oallama affinity-report --format json`: bytes and seconds; operators in rank order."""
    plan, run = asdict(report.plan), report.run
    return {
        "model": model_document(report.model),
        "device": report.device,
        "phase": report.phase,
        "iterations": report.iterations,
        "converged": report.converged,
        "operators": [_operator_document(row) for row in report.operators],
        "memory": to_json(report.plan.memory),
        **{key: plan[key] for key in ("predicted", "notes", "workload")},
        "baselines": [asdict(baseline) for baseline in report.baselines],
        "measured": report.measured and asdict(report.measured),
        "policy": plan["policy"],
        "of_plan": report.of_plan,
        **{key: plan[key] for key in ("token_assignment", "streaming", "draft")},
        **({"devices": list(map(_device_document, report.devices))} if report.devices else {}),
        "run": run and {"measured": run.measured, **{key: asdict(run.plan)[key] for key in RUN_KEYS}},
    }


def _device_document(device: DeviceTimes) -> dict[str, Any]:
    operators = [
        {key: getattr(row, key) for key in ("name", "t_gpu_s", "t_transfer_s")} for row in device.rows.values()
    ]
    memory = None if device.memory is None else to_json(device.memory)
    return {"device": device.device, "layers": list(device.layers), "memory": memory, "operators": operators}


RUN_KEYS = ("policy", "predicted", "memory", "operators", "token_assignment", "streaming", "notes")


def compared_table(report: AffinityReport) -> Table:
    """The baselines, the report's plan, and last the plan that `oallama run` uses, if requested."""
    plan_name = f"policy {report.plan.policy}" if report.of_plan else "OATO's ranking alone"
    predicted = predicted_by(report.plan)
    plans = [*((baseline.name, baseline.predicted) for baseline in report.baselines), (plan_name, predicted)]
    if report.run is not None:
        of_run = predicted_by(report.run.plan)
        if of_run == predicted:
            plans.pop()
        plans.append((f"what run uses: {report.run.plan.policy}", of_run))
    last_total_s = plans[-1][1].total_s
    rows = [
        (
            name,
            format_seconds(times.total_s),
            f"{times.total_s / last_total_s:.2f}" if last_total_s > 0 else "-",
            format_seconds(times.ttft_s),
            format_seconds(times.tpot_s),
            rate_text(times.tpot_s),
        )
        for name, times in plans
    ]
    workload = report.plan.workload
    title = f"What it gains, predicted for {workload.n_prompt:,} + {workload.n_gen:,} tokens"
    headings = "placement |>whole run |>× the last |>first token |>per token |>rate"
    return table(title, headings, rows)


#
# operators that are alike, in one line
#


@dataclass(frozen=True, slots=True)
class Fold:
    """Operators of one role, type, shape and backend. Times are medians over them; spans are (least, greatest)."""

    role: str
    type: str
    shape: Shape
    backend: str  # with the number of the device, where there are several
    layers: tuple[int, ...]  # ascending; empty for an operator outside blocks
    count: int
    bytes: int  # together
    t_cpu_s: float
    t_gpu_s: float | None  # None: the device cannot compute it
    t_transfer_s: float
    saved_s: float | None
    affinity: tuple[float, float]
    ranked: Backend | None  # where the ranking by itself puts them; None: where they are
    ranks: tuple[int, ...]  # ascending


def fold(
    rows: Sequence[Affinity], ranked: Mapping[str, Backend] | None = None, places: Mapping[str, str] | None = None
) -> tuple[Fold, ...]:
    """One Fold per (role, type, shape, backend), in the order of their best rank. ranked: where the ranking by itself
    puts operators, by name; those that it puts elsewhere are in another line. places: as in AffinityReport; None: their
    back ends."""
    groups: dict[tuple[str, str, Shape, bool, str, Backend | None], list[Affinity]] = {}
    for row in rows:
        ranked_place = None if ranked is None else ranked[row.name]
        place = row.backend if places is None else places[row.name]
        groups.setdefault((row.role, row.type, row.shape, row.layer is None, place, ranked_place), []).append(row)
    folds = (_fold(group, place, ranked_place) for (*_, place, ranked_place), group in groups.items())
    return tuple(sorted(folds, key=lambda f: f.ranks))


def _fold(group: Sequence[Affinity], place: str, ranked: Backend | None) -> Fold:
    first = group[0]
    affinities = [row.affinity for row in group]
    return Fold(
        role=first.role,
        type=first.type,
        shape=first.shape,
        backend=place,
        layers=tuple(sorted(row.layer for row in group if row.layer is not None)),
        count=len(group),
        bytes=sum(row.bytes for row in group),
        t_cpu_s=median(row.t_cpu_s for row in group),
        t_gpu_s=_median(row.t_gpu_s for row in group),
        t_transfer_s=median(row.t_transfer_s for row in group),
        saved_s=_median(row.saved_s for row in group),
        affinity=(min(affinities), max(affinities)),
        ranked=ranked,
        ranks=tuple(sorted(row.rank for row in group)),
    )


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None
