"""The report of `oallama simulate`: a trace for Perfetto, tables and a picture of the four streams. All values are
predictions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oallama.core.types import ModelInfo
from oallama.core.units import format_seconds
from oallama.planner.simulate import KINDS, RESOURCES, Activity, PhaseTimeline, Simulation
from oallama.report.chart import FONT, GREY, MARGIN, WIDTH, Bar, Text, svg
from oallama.report.table import WIDTH as LINE_WIDTH
from oallama.report.table import Table, table
from oallama.report.text import model_title

MICRO = 1e6
STREAMS = {"cpu": "CPU", "gpu": "GPU", "in": "copy in", "out": "copy out"}
LOOKS = {
    "operator": ("operators, whole", "#0b5cad"),
    "slice": ("split operators", "#2a9d8f"),
    "rest": ("non-matmul work", "#9aa7b4"),
    "stream": ("copied when needed", "#e07a1f"),
    "weights": ("weights for a batch", "#b3541e"),
    "activations": ("activations", "#d4a017"),
    "send": ("sends", "#5b6875"),
    "join": ("joins", "#3f7d20"),
}
"""Of a kind of work: (its meaning, its colour)."""


@dataclass(frozen=True, slots=True)
class SimulationSetting:
    """A simulation's model, plan and machine. machine: its name, or the profile's devices; sources: (figure, its
    source), empty for a measured profile."""

    model: ModelInfo
    policy: str
    device: str
    machine: str
    sources: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def simulate_document(setting: SimulationSetting, simulation: Simulation) -> dict[str, Any]:
    """A trace in Chrome's JSON format (Perfetto opens it): the prompt and the token as processes, streams as threads,
    µs. The keys beside it are in seconds."""
    model, workload, predicted = setting.model, simulation.workload, simulation.predicted
    return {
        "simulated": True,
        "model": {"path": model.path, "arch": model.arch, "n_layer": model.n_layer, "file_bytes": model.file_bytes},
        "machine": {"name": setting.machine, "device": setting.device, "sources": dict(setting.sources)},
        "policy": setting.policy,
        "workload": asdict(workload),
        "ttft_s": predicted.ttft_s,
        "tpot_s": predicted.tpot_s,
        "total_s": predicted.total_s,
        "prompt": _phase(simulation.prompt),
        "token": _phase(simulation.token),
        "notes": list(setting.notes),
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


def simulate_tables(setting: SimulationSetting, simulation: Simulation) -> list[Table]:
    """How busy each stream is, and the parts of a prompt's and a token's time."""
    workload, predicted = simulation.workload, simulation.predicted
    prompt, token = simulation.prompt, simulation.token
    past = f" after {workload.n_past:,}" if workload.n_past else ""
    title = (
        f"{model_title(setting.model)}, {workload.n_prompt} + {workload.n_gen} tokens{past}, policy {setting.policy}\n"
        f"on {setting.machine}: simulated, nothing was run\n"
        f"TTFT {format_seconds(predicted.ttft_s)}, TPOT {format_seconds(predicted.tpot_s)}, "
        f"together {format_seconds(predicted.total_s)}"
    )
    busy = [
        (STREAMS[s], f"{_share(prompt.busy_s(s), prompt):.0%}", f"{_share(token.busy_s(s), token):.0%}")
        for s in RESOURCES
    ]
    of_prompt, of_token = prompt.parts(), token.parts()
    part_rows = [
        (
            STREAMS[key[0]],
            LOOKS[key[1]][0],
            *(format_seconds(times[key]) if key in times else "" for times in (of_prompt, of_token)),
        )
        for key in sorted({*of_prompt, *of_token}, key=lambda key: (RESOURCES.index(key[0]), KINDS.index(key[1])))
    ]
    footer = [line for note in setting.notes for line in textwrap.wrap(f"Note: {note}.", LINE_WIDTH)]
    for figure, source in setting.sources:
        footer += textwrap.wrap(f"{figure}: {source}.", LINE_WIDTH, subsequent_indent="  ")
    return [
        table(title, "busy |>prompt |>token", busy),
        table("Parts (some run at the same time):", "stream |what |>prompt |>token", part_rows, footer),
    ]


#
# the picture
#

LANE, LANE_GAP, NAME = 26, 8, 80  # pixels: of a stream's row, between rows, left of them
TOP, TITLE, AXIS = 92, 26, 40  # above the first phase, of a phase's title, below its streams
LEGEND_STEP = 20
LEGEND_WIDTH = 170
LEGEND_COLUMNS = (WIDTH - 2 * MARGIN) // LEGEND_WIDTH
NEAR = 0.3  # pixels between works of one kind that are drawn as one

Phases = Sequence[tuple[str, PhaseTimeline]]
"""Name and course of each."""


def _streams_shapes(title: str, subtitle: str, phases: Phases, kinds: Sequence[str]) -> Iterator[Bar | Text]:
    """A row for each stream, of a prompt and of a token, each in its own scale."""
    yield Text(MARGIN, 32, title, 18)
    yield Text(MARGIN, 52, subtitle, 12, GREY)
    y = float(TOP)
    for name, phase in phases:
        yield from _phase_shapes(name, phase, y)
        y += _phase_height()
    for number, kind in enumerate(kinds):
        row, column = divmod(number, LEGEND_COLUMNS)
        x, entry_y = MARGIN + column * LEGEND_WIDTH, y + row * LEGEND_STEP
        yield from (Bar(x, entry_y - 10, 12, 12, LOOKS[kind][1]), Text(x + 18, entry_y, LOOKS[kind][0]))


def _phase_height() -> int:
    return TITLE + len(RESOURCES) * (LANE + LANE_GAP) + AXIS


def _phase_shapes(name: str, phase: PhaseTimeline, top: float) -> Iterator[Bar | Text]:
    left, width = MARGIN + NAME, WIDTH - 2 * MARGIN - NAME
    yield Text(MARGIN, top, f"{name}: {format_seconds(phase.seconds)}")
    y = top + TITLE - FONT
    for stream in RESOURCES:
        yield Text(left - 12, y + LANE - 8, STREAMS[stream], ends_at_x=True)
        yield Bar(left, y, width, LANE, "#eef1f4")
        scale = width / phase.seconds if phase.seconds else 0.0
        for kind, start, end in _merged([w for w in phase.activities if w.stream == stream], scale):
            yield Bar(left + start, y, max(0.3, end - start), LANE, LOOKS[kind][1])
        y += LANE + LANE_GAP
    for quarter in range(5):
        yield Text(
            left + width * quarter / 4, y + 8, format_seconds(phase.seconds * quarter / 4), 11, GREY, quarter > 0
        )


def _merged(activities: Sequence[Activity], scale: float) -> Iterator[tuple[str, float, float]]:
    """(kind, from, to) in pixels; neighbours of one kind, and what is too small to be seen, as one."""
    current: tuple[str, float, float] | None = None
    for activity in activities:
        start, end = activity.start_s * scale, activity.end_s * scale
        if current is not None and start - current[2] < NEAR and (activity.kind == current[0] or end - start < NEAR):
            current = (current[0], current[1], end)
            continue
        if current is not None:
            yield current
        current = (activity.kind, start, end)
    if current is not None:
        yield current


def simulate_chart(setting: SimulationSetting, simulation: Simulation) -> str:
    """The picture of the four streams as SVG."""
    workload, predicted = simulation.workload, simulation.predicted
    title = model_title(setting.model)
    phases = (
        (f"a prompt of {workload.n_prompt} tokens", simulation.prompt),
        ("one further token", simulation.token),
    )
    busy = "; ".join(
        f"{name}: " + ", ".join(f"{STREAMS[s]} {_share(phase.busy_s(s), phase):.0%}" for s in RESOURCES)
        for name, phase in phases
    )
    used_kinds = {activity.kind for _, phase in phases for activity in phase.activities}
    kinds = [kind for kind in KINDS if kind in used_kinds]
    subtitle = f"on {setting.machine}; simulated, nothing was run"
    return svg(
        TOP + len(phases) * _phase_height() + -(-len(kinds) // LEGEND_COLUMNS) * LEGEND_STEP + MARGIN,
        f"What CPU, GPU and copies of {title} do on {setting.machine}, simulated. Time to the first token "
        f"{format_seconds(predicted.ttft_s)}, per further token {format_seconds(predicted.tpot_s)}. Busy: {busy}",
        _streams_shapes(f"{title}: policy {setting.policy}", subtitle, phases, kinds),
    )
