"""The report of `oallama simulate`: a trace for Perfetto, and tables of the streams. All values are predictions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oallama.core.types import ModelInfo
from oallama.core.units import format_seconds
from oallama.planner.simulate import KINDS, RESOURCES, PhaseTimeline, Simulation
from oallama.report.table import WIDTH as LINE_WIDTH
from oallama.report.table import Table, table
from oallama.report.text import model_title

MICRO = 1e6
STREAMS = {"cpu": "CPU", "gpu": "GPU", "in": "copy in", "out": "copy out"}
WORK = {
    "operator": "operators, whole",
    "slice": "split operators",
    "rest": "non-matmul work",
    "stream": "copied when needed",
    "weights": "weights for a batch",
    "activations": "activations",
    "send": "sends",
    "join": "joins",
}
"""By kind."""


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
            WORK[key[1]],
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
