"""The report of `oallama simulate`: a trace for Perfetto, and tables of the streams. All values are predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from oallama.core.types import ModelInfo
from oallama.core.units import format_bytes, format_seconds
from oallama.device.machines import Machine
from oallama.plan.plan import Plan
from oallama.planner.simulate import KINDS, RESOURCES, PhaseTimeline, Simulation
from oallama.report.table import WIDTH, Table, table
from oallama.report.text import device_name, model_title

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
            WORK[key[1]],
            *(format_seconds(times[key]) if key in times else "" for times in (of_prompt, of_token)),
        )
        for key in sorted({*of_prompt, *of_token}, key=lambda key: (RESOURCES.index(key[0]), KINDS.index(key[1])))
    ]
    sources = () if machine is None else machine.sources
    footer = [f"Note: {note}." for note in _notes(plan, machine)] + [
        f"{figure}: {source}." for figure, source in sources
    ]
    return [
        table(title, "busy |>prompt |>token", busy, (times,), WIDTH),
        table("Parts (some run at the same time):", "stream |what |>prompt |>token", part_rows, footer, WIDTH),
    ]
