"""The report of `oallama simulate`: a trace for Perfetto, tables and a picture of the streams. All values are
predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from oallama.core.types import ModelInfo
from oallama.core.units import format_bytes, format_seconds
from oallama.device.machines import Machine
from oallama.plan.plan import Plan
from oallama.planner.simulate import KINDS, RESOURCES, Activity, PhaseTimeline, Simulation
from oallama.report import svg
from oallama.report.table import Table, table
from oallama.report.text import device_name, model_title

MICRO = 1e6
STREAMS = {"cpu": "CPU", "gpu": "GPU", "in": "copy in", "out": "copy out"}
WORK = {
    "operator": ("operators, whole", "#0b5cad"),
    "slice": ("split operators", "#2a9d8f"),
    "rest": ("non-matmul work", "#9aa7b4"),
    "stream": ("copied when needed", "#e07a1f"),
    "weights": ("weights for a batch", "#b3541e"),
    "activations": ("activations", "#d4a017"),
    "send": ("sends", "#5b6875"),
    "join": ("joins", "#3f7d20"),
}
"""By kind: its name and colour."""


def simulate_document(model: ModelInfo, plan: Plan, machine: Machine | None, simulation: Simulation) -> dict[str, Any]:
    """A trace in Chrome's JSON format (Perfetto opens it): the prompt and the token as processes, streams as threads,
    µs. The keys beside it are in seconds. machine: None: this one, as measured."""
    predicted = simulation.predicted
    name, device = _machine(plan, machine)
    return {
        "simulated": True,
        "model": {"path": model.path, "arch": model.arch, "n_layer": model.n_layer, "file_bytes": model.file_bytes},
        "machine": {"name": name, "device": device, "sources": {} if machine is None else dict(machine.sources)},
        "policy": plan.policy,
        "workload": asdict(simulation.workload),
        "ttft_s": predicted.ttft_s,
        "tpot_s": predicted.tpot_s,
        "total_s": predicted.total_s,
        "prompt": _phase(simulation.prompt),
        "token": _phase(simulation.token),
        "notes": list(_notes(plan, machine)),
        "displayTimeUnit": "ms",
        "traceEvents": [*_events(1, "prompt", simulation.prompt), *_events(2, "token", simulation.token)],
    }


def _events(process: int, name: str, phase: PhaseTimeline) -> Iterator[dict[str, Any]]:
    """Complete events ("X") of a phase, behind the names of its process and threads ("M")."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for thread, stream in enumerate(RESOURCES, start=1):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": STREAMS[stream]}}
    for activity in phase.activities:
        yield {
            "ph": "X", "name": activity.name, "cat": activity.kind,
            "pid": process, "tid": 1 + RESOURCES.index(activity.stream),
            "ts": activity.start_s * MICRO, "dur": activity.seconds * MICRO,
        }  # fmt: skip


def _phase(phase: PhaseTimeline) -> dict[str, Any]:
    return {
        "seconds": phase.seconds,
        "busy": {stream: _share(phase.busy_s(stream), phase) for stream in RESOURCES},
        "parts": [
            {"stream": stream, "kind": kind, "seconds": seconds} for (stream, kind), seconds in phase.parts().items()
        ],
    }


def _share(seconds: float, phase: PhaseTimeline) -> float:
    return min(1.0, seconds / phase.seconds) if phase.seconds else 0.0


def _machine(plan: Plan, machine: Machine | None) -> tuple[str, str]:
    """(name of the machine, of its device)."""
    if machine is not None:
        return machine.description, machine.card.name
    device = device_name(plan.device)
    return ("this machine" if plan.device == "none" else f"this machine with {device}"), device


def _notes(plan: Plan, machine: Machine | None) -> tuple[str, ...]:
    n_bytes = plan.memory.limit - plan.memory.spare
    if machine is None or n_bytes <= machine.card.memory_bytes:
        return plan.notes
    has = f"{machine.card.name} has {format_bytes(machine.card.memory_bytes)}"
    return (*plan.notes, f"the plan needs {format_bytes(n_bytes)} of device memory, but {has}")


def simulate_tables(model: ModelInfo, plan: Plan, machine: Machine | None, simulation: Simulation) -> list[Table]:
    """How busy each stream is, and the parts of a prompt's and a token's time. machine: None: this one, as measured."""
    workload, predicted = simulation.workload, simulation.predicted
    prompt, token = simulation.prompt, simulation.token
    past = f" after {workload.n_past:,}" if workload.n_past else ""
    title = (
        f"{model_title(model)}, {workload.n_prompt} + {workload.n_gen} tokens{past}, policy {plan.policy} on "
        f"{_machine(plan, machine)[0]}: simulated, nothing was run"
    )
    times = (
        f"TTFT {format_seconds(predicted.ttft_s)}, TPOT {format_seconds(predicted.tpot_s)}, together "
        f"{format_seconds(predicted.total_s)}."
    )
    busy = [
        (STREAMS[s], f"{_share(prompt.busy_s(s), prompt):.0%}", f"{_share(token.busy_s(s), token):.0%}")
        for s in RESOURCES
    ]
    of_prompt, of_token = prompt.parts(), token.parts()
    part_rows = [
        (
            STREAMS[key[0]],
            WORK[key[1]][0],
            *(format_seconds(times[key]) if key in times else "" for times in (of_prompt, of_token)),
        )
        for key in sorted({*of_prompt, *of_token}, key=lambda key: (RESOURCES.index(key[0]), KINDS.index(key[1])))
    ]
    sources = () if machine is None else machine.sources
    footer = [f"Note: {note}." for note in _notes(plan, machine)] + [
        f"{figure}: {source}." for figure, source in sources
    ]
    return [
        table(title, "busy |>prompt |>token", busy, (times,)),
        table("Parts (some run at the same time):", "stream |what |>prompt |>token", part_rows, footer),
    ]


#
# the picture
#

LANE, LANE_GAP, NAME = 26, 8, 80  # pixels: of a stream's row, between rows, left of them
TOP, TITLE, AXIS = 92, 26, 40  # above the first phase, of a phase's title, below its streams
LEGEND_STEP, LEGEND_WIDTH = 20, 170
LEGEND_COLUMNS = (svg.WIDTH - 2 * svg.MARGIN) // LEGEND_WIDTH
NEAR = 0.3  # pixels between activities of one kind that are drawn as one bar
PHASE_HEIGHT = TITLE + len(RESOURCES) * (LANE + LANE_GAP) + AXIS


def simulate_svg(model: ModelInfo, plan: Plan, machine: Machine | None, simulation: Simulation) -> str:
    """Return a picture of what each stream does during a prompt, and during one token."""
    workload, predicted = simulation.workload, simulation.predicted
    phases = ((f"a prompt of {workload.n_prompt} tokens", simulation.prompt), ("one further token", simulation.token))
    kinds = [kind for kind in KINDS if any(kind == w.kind for _, phase in phases for w in phase.activities)]
    busy = "; ".join(
        f"{name}: " + ", ".join(f"{STREAMS[s]} {_share(phase.busy_s(s), phase):.0%}" for s in RESOURCES)
        for name, phase in phases
    )
    title, where = model_title(model), _machine(plan, machine)[0]
    label = (
        f"What CPU, GPU and copies of {title} do on {where}, simulated. Time to the first token "
        f"{format_seconds(predicted.ttft_s)}, per further token {format_seconds(predicted.tpot_s)}. Busy: {busy}"
    )
    shapes = [shape for n, phase in enumerate(phases) for shape in _phase_shapes(*phase, TOP + n * PHASE_HEIGHT)]
    legend_y = TOP + len(phases) * PHASE_HEIGHT
    for number, kind in enumerate(kinds):
        row, column = divmod(number, LEGEND_COLUMNS)
        x, y = svg.MARGIN + column * LEGEND_WIDTH, legend_y + row * LEGEND_STEP
        shapes += [svg.bar(x, y - 10, 12, 12, WORK[kind][1]), svg.text(x + 18, y, WORK[kind][0])]
    height = legend_y + -(-len(kinds) // LEGEND_COLUMNS) * LEGEND_STEP + svg.MARGIN
    return svg.svg(height, f"{title}: policy {plan.policy}", f"on {where}; simulated, nothing was run", shapes, label)


def _phase_shapes(name: str, phase: PhaseTimeline, top: float) -> Iterator[str]:
    """A row for each stream, in the phase's own scale."""
    left, width = svg.MARGIN + NAME, svg.WIDTH - 2 * svg.MARGIN - NAME
    scale = width / phase.seconds if phase.seconds else 0.0
    yield svg.text(svg.MARGIN, top, f"{name}: {format_seconds(phase.seconds)}")
    y = top + TITLE - 13
    for stream in RESOURCES:
        yield svg.text(left - 12, y + LANE - 8, STREAMS[stream], ends_at_x=True)
        yield svg.bar(left, y, width, LANE, "#eef1f4")
        for kind, start, end in _merged([w for w in phase.activities if w.stream == stream], scale):
            yield svg.bar(left + start, y, max(NEAR, end - start), LANE, WORK[kind][1])
        y += LANE + LANE_GAP
    for quarter in range(5):
        x, seconds = left + width * quarter / 4, phase.seconds * quarter / 4
        yield svg.text(x, y + 8, format_seconds(seconds), 11, svg.GREY, quarter > 0)


def _merged(activities: Sequence[Activity], scale: float) -> list[tuple[str, float, float]]:
    """(kind, from, to) in pixels; neighbours of one kind, and what is too small to be seen, as one."""
    bars: list[tuple[str, float, float]] = []
    for activity in activities:
        start, end = activity.start_s * scale, activity.end_s * scale
        if bars and start - bars[-1][2] < NEAR and (activity.kind == bars[-1][0] or end - start < NEAR):
            bars[-1] = (*bars[-1][:2], end)
        else:
            bars.append((activity.kind, start, end))
    return bars
