"""The timeline and the switches: where the time of a token and of a prompt goes.

Two plans made by hand, each in an engine of its own: attention and KV on the device and so much of every FFN as well,
which is kept there (`split`), or half of it streamed (`streamed`). Of each, on any device: the backend's counters
(launching, computing CC, waiting, joining; bytes), and its trace: what the caller's thread, the device and the link did
when. With `cupti`, where this is CUDA and torch is installed, every kernel and copy besides, from CUDA's own activity
records (through torch's profiler).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.generation import best_layout, generations
from experiments.traces import events_of, last_token, overlap_of, sums_of, trace_of

ROUNDS = 5
MAX_EVENTS = 2000
MAX_SPANS = 1500


def stages(engine: Any, prompt: list[int], n_gen: int) -> dict[str, Any]:
    """Medians over ROUNDS generations, after one more, and the counters of the last."""
    rows = generations(engine, prompt, n_gen, ROUNDS)
    found: dict[str, Any] = {key: statistics.median(row[key] for row in rows) for key in ("ttft_s", "tpot_s")}
    found["samples"] = {key: [row[key] for row in rows] for key in ("ttft_s", "tpot_s")}
    last = engine.split_stats
    if last is not None:
        found["token"] = {key: statistics.median(row[key] for row in rows) for key in last.per_token()}
        found["prompt"], found["decode"], found["n_decoded"] = asdict(last.prompt), asdict(last.decode), last.n_decoded
    return found


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


def traced(engine: Any, prompt: list[int], n_gen: int, device: str) -> dict[str, Any]:
    """The backend's own trace of a generation's prompt and of its last token."""
    from oallama.device.load_params import load_bridge

    split = load_bridge().split()
    split.start_trace(watched=trace_of(device))
    engine.generate(prompt, max_tokens=n_gen, temperature=0.0)
    spans = [asdict(span) for span in split.stop_trace()]
    found = {}
    for what, steps in (("token", last_token(spans)), ("prompt", [s for s in spans if s["n_tokens"] > 1])):
        first = min((span["begin_s"] for span in steps), default=0.0)
        rows = [{**span, "begin_s": span["begin_s"] - first, "end_s": span["end_s"] - first} for span in steps]
        found[what] = {"n_spans": len(rows), "sums": sums_of(rows), "spans": rows[:MAX_SPANS]}
    return found


CUT = 256
"""A multiple of every type's granularity, so that gate, up and down of an FFN can all be cut there."""


def made_plans(placer: Any, share: float, n_prompt: int, n_gen: int) -> dict[str, Any]:
    """Attention, output and KV on the device, and of every FFN `share` as well: GG, in `split`; half of it CG, in
    `streamed`. The rest is CC, in the layout that llama.cpp would choose."""
    from oallama.core.types import OperatorPlacement
    from oallama.cost.blocks import is_ffn
    from oallama.model.cut import cut_extent

    base = placer.cpu_plan(placer.workload(n_prompt, n_gen))
    made: dict[str, list[OperatorPlacement]] = {"split": [], "streamed": []}
    for operator in placer.operators:
        extent = cut_extent(operator)
        there = max(1, round(share * extent / CUT)) * CUT if is_ffn(operator) else extent
        for name, placements in made.items():
            cg = there // 2 // CUT * CUT if name == "streamed" and is_ffn(operator) else 0
            cc = extent - there
            layout = best_layout(operator, cc) if cc else None
            placements.append(OperatorPlacement(operator.name, (there - cg) / extent, cg / extent, cc / extent, layout))
    changes = {"device": str(placer.device), "policy": "manual", "n_gpu_layers": placer.model.n_layer + 1}
    return {name: replace(base, operators=tuple(placements), **changes) for name, placements in made.items()}


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is found of each plan. settings: model (its path), device, threads, n_prompt, n_gen, share of every FFN on
    the device, cupti, folder for what is written meanwhile."""
    import numpy as np

    from oallama.device.spec import parse_device
    from oallama.placer import Placer

    device = parse_device(settings["device"]).timed
    placer = Placer.load(settings["model"], device=device, threads=settings["threads"])
    n_prompt, n_gen = settings["n_prompt"], settings["n_gen"]
    rng = np.random.default_rng(3)
    prompt = [int(token) for token in rng.integers(300, placer.model.n_vocab, n_prompt)]
    for name, plan in made_plans(placer, settings["share"], n_prompt, n_gen).items():
        with placer.engine(plan) as engine:
            n_split = sum(0 < p.gg < 1 or p.cg > 0 for p in plan.operators)
            size = engine.memory.device_bytes
            yield {"plan": name, "what": "plan", "split_operators": n_split, "device_bytes": size}
            yield {"plan": name, "what": "stages", **stages(engine, prompt, n_gen)}
            yield {"plan": name, "what": "trace", **traced(engine, prompt, 4, str(device))}
            for what, tokens, n in (("decode", prompt[:8], 4), ("prompt", prompt, 1)) if settings["cupti"] else ():
                row = {"plan": name, "what": f"{what} kernels"}
                try:
                    yield {**row, **cupti(engine, tokens, n, Path(settings["folder"]))}
                except Exception as error:  # no torch, no CUPTI: the trace above stands
                    yield {**row, "missing": f"{type(error).__name__}: {error}"[:300]}
