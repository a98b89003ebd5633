"""Child of the timeline and the switches: one plan that splits, one engine, and where its time goes.

    python -m gpu_steps.timeline_case --model M --device CUDA0 --threads 16 -p 1024 -n 32 --share 0.5 --out FILE.jsonl

On any device: what the split backend counts of a token and of the prompt (launching, computing CC, waiting for the
device, joining; bytes copied and streamed). With --trace, where this is CUDA and torch is installed: every kernel
and copy of a decode token and of a prompt block with its stream, from CUDA's own activity records (CUPTI, through
torch's profiler).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROUNDS = 5
MAX_EVENTS = 3000


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


def busy_us(events: list[dict[str, Any]]) -> float:
    """Time in which at least one of the events was under way."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["start_us"]):
        end = event["start_us"] + event["us"]
        total += max(0.0, end - max(event["start_us"], until))
        until = max(until, end)
    return total


def overlap_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """How much of the copying to the device lay beside kernels: microseconds of either, of both at once, of any."""
    copies = [event for event in events if event["kind"] == "copy" and "HtoD" in event["name"]]
    kernels = [event for event in events if event["kind"] == "kernel"]
    copy, kernel, any_of = busy_us(copies), busy_us(kernels), busy_us([*copies, *kernels])
    return {"copy_us": copy, "kernel_us": kernel, "both_us": copy + kernel - any_of, "any_us": any_of}


def traced(engine: Any, prompt: list[int], n_gen: int, folder: Path) -> dict[str, Any]:
    """The trace of one short generation, and what it says of the overlap."""
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("-p", type=int, required=True)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--policy", default="split")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import numpy as np

    from oallama.placer import Placer

    placer = Placer.load(options.model, device=options.device, gpu_weights=options.share, threads=options.threads)
    plan = placer.plan(options.policy, n_prompt=options.p, n_gen=options.n)
    rng = np.random.default_rng(3)
    prompt = [int(token) for token in rng.integers(300, placer.model.n_vocab, options.p)]
    with options.out.open("w", encoding="utf-8") as out, placer.engine(plan) as engine:

        def write(what: str, row: dict[str, Any]) -> None:
            out.write(json.dumps({"what": what, **row}) + "\n")
            out.flush()

        split = sum(0 < p.gg < 1 or p.cg > 0 for p in plan.operators)
        predicted = asdict(plan.record.predicted) if plan.record.predicted else None
        write("plan", {"policy": plan.policy, "split_operators": split, "device_bytes": engine.memory.device_bytes,
                       "predicted": predicted})  # fmt: skip
        write("stages", stages(engine, prompt, options.n))
        if options.trace:
            for what, tokens, n_gen in (("decode trace", prompt[:8], 4), ("prompt trace", prompt, 1)):
                try:
                    write(what, traced(engine, tokens, n_gen, options.out.parent))
                except Exception as error:  # no torch, no CUPTI: the counters above stand
                    write(what, {"missing": f"{type(error).__name__}: {error}"[:300]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
