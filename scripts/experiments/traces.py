"""Traces: what CPU, device and link did when, and how much of it at the same time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.machine import backend_of

DEVICE_STEPS = ("resident", "streamed")
"""In which the device computes."""


def union(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of what at least one of the intervals covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def trace_of(device: str) -> Any:
    """What can be traced of a device: as in SplitBackend.start_trace."""
    return {"RPC": "read back", "CUDA": "events", "ROCm": "events", "MUSA": "events"}.get(backend_of(device), "caller")


def last_token(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans of the last single token: its phases are the last of as many as there are names. (Of a prompt the last
    layer computes one token too, so a first phase with one token need not be a token's first.)"""
    single = [span for span in spans if span["n_tokens"] == 1]
    starts = [span for span in single if span["step"] == "launch"]
    n_phases = len({span["name"] for span in starts})
    return [span for span in single if span["begin_s"] >= starts[-n_phases]["begin_s"]] if starts else []


def sums_of(spans: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of every step, in which the device computed, the link copied, both at once, and the device beside CC;
    of the device and the link nothing where they were not traced."""

    def covered(*steps: str) -> float:
        rows = [(span["begin_s"], span["end_s"]) for span in spans if span["step"] in steps]
        return union(rows)

    found = {f"{step}_s": covered(step) for step in dict.fromkeys(span["step"] for span in spans)}
    found["span_s"] = max((span["end_s"] for span in spans), default=0.0)
    if not any(span["step"] in DEVICE_STEPS for span in spans):
        return found
    device, copy, host = covered(*DEVICE_STEPS), covered("copy"), covered("host")
    found["device_s"] = device
    found["copy_beside_device_s"] = copy + device - covered("copy", *DEVICE_STEPS)
    found["host_beside_device_s"] = host + device - covered("host", *DEVICE_STEPS)
    found["bytes_copied"] = sum(span["bytes"] for span in spans if span["step"] == "copy")
    return found


def events_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels and copies of a Chrome trace, by start: name, kind, stream, start_us from the first, us, bytes."""
    kinds = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "set"}
    rows = [
        {
            "kind": kinds[event["cat"]], "name": str(event["name"])[:80], "stream": event.get("args", {}).get("stream"),
            "start_us": float(event["ts"]), "us": float(event["dur"]), "bytes": event.get("args", {}).get("bytes"),
        }
        for event in trace.get("traceEvents", []) if event.get("cat") in kinds and "dur" in event
    ]  # fmt: skip
    rows.sort(key=lambda row: row["start_us"])
    first = rows[0]["start_us"] if rows else 0.0
    return [{**row, "start_us": round(row["start_us"] - first, 3)} for row in rows]


def overlap_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """How much of the copying to the device lay beside kernels: microseconds of either, of both at once, of any."""

    def covered(rows: list[dict[str, Any]]) -> float:
        return union([(event["start_us"], event["start_us"] + event["us"]) for event in rows])

    copies = [event for event in events if event["kind"] == "copy" and "HtoD" in event["name"]]
    kernels = [event for event in events if event["kind"] == "kernel"]
    copy, kernel, any_of = covered(copies), covered(kernels), covered([*copies, *kernels])
    return {"copy_us": copy, "kernel_us": kernel, "both_us": copy + kernel - any_of, "any_us": any_of}
