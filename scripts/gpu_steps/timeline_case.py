"""Child of the timeline and the switches: where the time of a token and of a prompt goes.

    python -m gpu_steps.timeline_case --model M --device CUDA0 --threads 16 -p 1024 -n 32 --share 0.5 --out FILE.jsonl

Two plans made by hand, each in an engine of its own: attention and KV on the device and so much of every FFN as well,
which is kept there (`split`), or half of it streamed (`streamed`). Of each, on any device: the backend's counters
(launching, computing CC, waiting, joining; bytes), and its trace: what the caller's thread, the device and the link did
when. With --cupti, where this is CUDA and torch is installed, every kernel and copy besides, from CUDA's own activity
records (through torch's profiler).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_steps.steps import backend_of

ROUNDS = 5
MAX_EVENTS = 2000
MAX_SPANS = 1500
DEVICE_STEPS = ("resident", "streamed")
"""In which the device computes."""


def stages(engine: Any, prompt: list[int], n_gen: int) -> dict[str, Any]:
    """Medians over ROUNDS generations, after one more."""
    rows = []
    for seed in range(ROUNDS + 1):
        made = engine.generate(prompt, max_tokens=n_gen, temperature=0.0, seed=seed)
        if seed and made.n_gen > 1:
            rows.append({"ttft_s": made.ttft_s, "tpot_s": made.tpot_s, "stats": engine.split_stats})
    if not rows:
        raise SystemExit("the model ends at once: there is nothing to time")
    found: dict[str, Any] = {key: statistics.median(row[key] for row in rows) for key in ("ttft_s", "tpot_s")}
    found["samples"] = {key: [row[key] for row in rows] for key in ("ttft_s", "tpot_s")}
    last = rows[-1]["stats"]
    if last is not None:
        found["token"] = {key: statistics.median(row["stats"].per_token()[key] for row in rows)
                          for key in last.per_token()}  # fmt: skip
        found["prompt"], found["decode"], found["n_decoded"] = asdict(last.prompt), asdict(last.decode), last.n_decoded
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


def cupti(engine: Any, prompt: list[int], n_gen: int, folder: Path) -> dict[str, Any]:
    """Kernels and copies of one short generation, and what they say of the overlap."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine.generate(prompt, max_tokens=2, temperature=0.0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompt, max_tokens=n_gen, temperature=0.0)
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = events_of(json.loads(path.read_text(encoding="utf-8")))
    path.unlink()
    streams = sorted({str(event["stream"]) for event in events})
    return {"n_events": len(events), "overlap": overlap_of(events), "streams": streams,
            "events": events[:MAX_EVENTS]}  # fmt: skip


def trace_of(device: str) -> Any:
    """What can be traced of a device: as in SplitBackend.start_trace."""
    return {"RPC": "read back", "CUDA": "events", "ROCm": "events", "MUSA": "events"}.get(backend_of(device), "caller")


def traced(engine: Any, prompt: list[int], n_gen: int, device: str) -> dict[str, Any]:
    """The backend's own trace of a generation's prompt and of its last token."""
    from oallama.device.load_params import load_bridge

    split = load_bridge().split()
    split.start_trace(of=trace_of(device))
    engine.generate(prompt, max_tokens=n_gen, temperature=0.0)
    spans = [asdict(span) for span in split.stop_trace()]
    found = {}
    for what, of in (("token", last_token(spans)), ("prompt", [s for s in spans if s["n_tokens"] > 1])):
        first = min((span["begin_s"] for span in of), default=0.0)
        rows = [{**span, "begin_s": span["begin_s"] - first, "end_s": span["end_s"] - first} for span in of]
        found[what] = {"n_spans": len(rows), "sums": sums_of(rows), "spans": rows[:MAX_SPANS]}
    return found


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


def union(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of what at least one of the intervals covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


CUT = 256
"""A multiple of every type's granularity, so that gate, up and down of an FFN can all be cut there."""


def made_plans(placer: Any, share: float, n_prompt: int, n_gen: int) -> dict[str, Any]:
    """Attention, output and KV on the device, and of every FFN `share` as well: GG, in `split`; half of it CG, in
    `streamed`. The rest is CC, in the layout that llama.cpp would choose."""
    from oallama.core.types import OperatorPlacement
    from oallama.model.cut import cut_extent
    from oallama.plan.plan import Plan

    base = placer.cpu_plan(n_prompt, n_gen)
    made: dict[str, list[OperatorPlacement]] = {"split": [], "streamed": []}
    for operator in placer.operators:
        extent = cut_extent(operator)
        is_ffn = operator.role.startswith("ffn") and "gate_inp" not in operator.role
        there = max(1, round(share * extent / CUT)) * CUT if is_ffn else extent
        for name, placements in made.items():
            cg = there // 2 // CUT * CUT if name == "streamed" and is_ffn else 0
            cc = extent - there
            layout = best_layout(operator, cc) if cc else None
            placements.append(OperatorPlacement(operator.name, (there - cg) / extent, cg / extent, cc / extent, layout))
    changes = {"device": str(placer.device), "policy": "manual", "n_gpu_layers": placer.model.n_layer + 1}
    return {
        name: Plan(replace(base.record, operators=tuple(placements), **changes)) for name, placements in made.items()
    }


def best_layout(operator: Any, cc: int) -> str:
    """The first layout that llama.cpp would take for a slice of so many elements."""
    from oallama.device.load_params import load_bridge
    from oallama.model.cut import cut_axis

    bridge = load_bridge()
    k, n, e = operator.shape
    columns, rows = (cc, n) if cut_axis(operator) == "cols" else (k, cc)
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 0
    layouts = bridge.cpu_layouts()
    return str(next(x for x in layouts if bridge.layout_supports(x, operator.type, columns, rows, e, used)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("-p", type=int, required=True)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--cupti", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import numpy as np

    from oallama.placer import Placer

    placer = Placer.load(options.model, device=options.device, threads=options.threads)
    rng = np.random.default_rng(3)
    prompt = [int(token) for token in rng.integers(300, placer.model.n_vocab, options.p)]
    with options.out.open("w", encoding="utf-8") as out:
        for name, plan in made_plans(placer, options.share, options.p, options.n).items():
            with placer.engine(plan) as engine:
                for row in rows_of(engine, plan, prompt, options):
                    out.write(json.dumps({"plan": name, **row}) + "\n")
                    out.flush()
    return 0


def rows_of(engine: Any, plan: Any, prompt: list[int], options: argparse.Namespace) -> Any:
    """What is found of one plan, each as soon as it is."""
    n_split = sum(0 < p.gg < 1 or p.cg > 0 for p in plan.operators)
    yield {"what": "plan", "split_operators": n_split, "device_bytes": engine.memory.device_bytes}
    yield {"what": "stages", **stages(engine, prompt, options.n)}
    yield {"what": "trace", **traced(engine, prompt, 4, options.device)}
    if options.cupti:
        for what, tokens, n_gen in (("decode", prompt[:8], 4), ("prompt", prompt, 1)):
            try:
                yield {"what": f"{what} kernels", **cupti(engine, tokens, n_gen, options.out.parent)}
            except Exception as error:  # no torch, no CUPTI: the trace above stands
                yield {"what": f"{what} kernels", "missing": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    sys.exit(main())
