#!/usr/bin/env python3
"""Measure what docs/scheinfer.md says of streamed slices on this machine; raw samples go to a JSON file.

    scripts/measure_slices.py random MODEL      # predicted against measured t_fin of random (r_GG, r_CG, n_g)
    scripts/measure_slices.py streams MODEL     # when host, device and link were busy: one prompt, one token
    scripts/measure_slices.py contention MODEL  # CC, CG and GG alone and at the same time

t_fin of a block is from the launch of its device part to the end of its join. --cpus 0 keeps the engine off the core of
a worker on core 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_steps.timeline_case import trace_of
from measure_foundation import lasting_prompt
from tqdm import tqdm

from ggml_bridge.split import Span, TraceOf
from oallama import Placer, Plan
from oallama.bench.child import pin_threads
from oallama.core.types import FlashAttention, Workload
from oallama.cost.kernels import PLAIN_LAYOUT
from oallama.cost.slices import BlockCost, Cut
from oallama.cost.timeline import PAPER, Prefetch
from oallama.device.load_params import load_bridge
from oallama.device.spec import parse_cpus
from oallama.place.cuts import n_g_at
from oallama.place.decide import decide_as_given
from oallama.place.placed import cpu
from oallama.place.problem import costs_of
from oallama.place.slicer import SlicePlan, Slicer, staging_bytes

ATTENTION: FlashAttention = "on"
CALLER = ("launch", "host", "wait", "ahead", "join")


def measure_random(args: argparse.Namespace) -> dict[str, Any]:
    """Random cuts of every FFN alike: t_fin of a block in a prompt of n_prompt tokens, n_g of them on the device, and
    in decode, median over layers and passes, against the timeline's. Each of args.passes through all cuts has a profile
    of its own, so that prediction and measurement see the same hours of the machine; medians over passes count."""
    placer, slicer, load = set_up(args)
    draw = random.Random(args.seed)
    rows: list[dict[str, Any]] = []
    for _ in range(args.n):
        gg = draw.uniform(0.0, 0.6)
        cg = draw.uniform(0.0, 0.6 * (1 - gg)) * draw.choice((0, 1, 1))
        n_g = round(draw.choice((0, 0, draw.uniform(0.05, 0.8))) * args.n_prompt)
        rows.append({"r_gg": gg, "r_cg": cg, "n_g": n_g})
    for number, row in tqdm(
        [(number, row) for number in range(args.passes) for row in rows], unit="cut", disable=not sys.stderr.isatty()
    ):
        if number and row is rows[0]:
            placer.profile(refresh=True)
            slicer = slicer_of(placer, load, args)
        plan = sliced(placer, slicer, load, row["r_gg"], row["r_cg"], row["n_g"])
        spans = traced(placer, plan_of(placer, load, plan, slicer), args, of="caller")
        for phase, n_tokens in (("prompt", args.n_prompt), ("decode", 1)):
            measured = [t_fin(steps) for steps in phases_of(spans, n_tokens).values()]
            add_pass(row.setdefault(phase, {}), predicted_t_fin(plan, slicer, n_tokens), measured)
        if number == args.passes - 1:
            said = (f"{phase} {1e3 * row[phase]['measured_s']:.2f} ms, predicted {1e3 * row[phase]['predicted_s']:.2f} "
                    f"({100 * row[phase]['error']:+.0f} %)" for phase in ("prompt", "decode"))  # fmt: skip
            tqdm.write(f"r_GG {row['r_gg']:.2f} r_CG {row['r_cg']:.2f} n_g {row['n_g']:4d}: {', '.join(said)}")
    errors = {p: statistics.median(abs(row[p]["error"]) for row in rows) for p in ("prompt", "decode")}
    print(f"median error of t_fin: prompt {100 * errors['prompt']:.1f} %, decode {100 * errors['decode']:.1f} %")
    return {"n_prompt": args.n_prompt, "seed": args.seed, "passes": args.passes, "median_error": errors, "rows": rows}


def add_pass(found: dict[str, Any], predicted_s: float, samples_s: list[float]) -> None:
    """One pass's prediction and samples; medians and error over all of them so far."""
    found.setdefault("passes", []).append({"predicted_s": predicted_s, "samples_s": samples_s})
    found["predicted_s"] = statistics.median(one["predicted_s"] for one in found["passes"])
    found["measured_s"] = statistics.median(statistics.median(one["samples_s"]) for one in found["passes"])
    found["error"] = found["predicted_s"] / found["measured_s"] - 1


def measure_streams(args: argparse.Namespace) -> dict[str, Any]:
    """The steps of one prompt and of one token after the first few, beside the predicted timeline, for r_GG, r_CG and
    n_g as given; the share of the time that the link was busy."""
    placer, slicer, load = set_up(args)
    plan = sliced(placer, slicer, load, args.gg, args.cg, round(args.n_g * args.n_prompt))
    spans = traced(placer, plan_of(placer, load, plan, slicer), args)
    found: dict[str, Any] = {"r_gg": args.gg, "r_cg": args.cg, "n_g": n_g_at(plan.token_assignment, args.n_prompt)}
    for phase, n_tokens in (("prompt", args.n_prompt), ("decode", 1)):
        steps = one_pass(spans, n_tokens)
        begin, end = min(s.begin_s for s in steps), max(s.end_s for s in steps)
        predicted = slicer.timeline(plan, n_tokens, 2)
        half = predicted.block_ends_s[len(plan.layers) - 1]
        found[phase] = {
            "seconds": end - begin,
            "link_busy": busy(steps, ("copy",)) / (end - begin),
            "device_busy": busy(steps, ("resident", "streamed")) / (end - begin),
            "measured": [[s.step, s.name, s.begin_s - begin, s.end_s - begin, s.bytes] for s in steps],
            "predicted_seconds": predicted.end_s - half,
            "predicted": [[s.stream, s.block, s.start_s - half, s.end_s - half] for s in predicted.spans
                          if s.end_s > half],
        }  # fmt: skip
        print(
            f"{phase}: {1e3 * (end - begin):.1f} ms, predicted {1e3 * found[phase]['predicted_seconds']:.1f}; "
            f"link busy {100 * found[phase]['link_busy']:.0f} %, device {100 * found[phase]['device_busy']:.0f} %"
        )
    return found


def measure_contention(args: argparse.Namespace) -> dict[str, Any]:
    """What CC takes in decode while nothing, the device's GG, or the copies of CG run beside it, and what those take.
    CC is half of each FFN in every arm but the one in which it is alone."""
    placer, slicer, load = set_up(args)
    arms = {"CC + GG": (0.5, 0.0), "CC + CG": (0.0, 0.5), "CC + GG + CG": (0.25, 0.25), "CC alone": (0.0, 0.0)}
    found: dict[str, Any] = {}
    for name, (gg, cg) in arms.items():
        plan = sliced(placer, slicer, load, gg, cg, 0)
        spans = traced(placer, plan_of(placer, load, plan, slicer), args)
        phases = phases_of(spans, 1)
        if not phases:
            continue
        share = 1.0 - gg - cg
        every = [s for steps in phases.values() for s in steps]
        steps = {step: statistics.median([s.end_s - s.begin_s for s in every if s.step == step] or [0.0])
                 for step in ("host", "resident", "stall", "streamed", "copy")}  # fmt: skip
        found[name] = {"r_cc": share, "t_fin_s": statistics.median(map(t_fin, phases.values())), **steps,
                       "host_s_per_unit": steps["host"] / share}  # fmt: skip
        print(f"{name:13s} t_fin {1e3 * found[name]['t_fin_s']:.2f} ms, CC {1e3 * steps['host']:.2f} ms "
              f"({1e3 * steps['host'] / share:.2f} ms for all of an FFN), GG {1e3 * steps['resident']:.2f}, "
              f"copy {1e3 * steps['copy']:.2f}, CG {1e3 * steps['streamed']:.2f}")  # fmt: skip
    contention = placer.profile().contention
    found["profile"] = None if contention is None else {
        name: getattr(contention, name) for name in contention.__dataclass_fields__
    }  # fmt: skip
    return found


#
# plans
#


def set_up(args: argparse.Namespace) -> tuple[Placer, Slicer, Workload]:
    placer = Placer.load(args.model, device=args.device, threads=args.threads, flash_attn=ATTENTION)
    load = placer.workload(args.n_prompt, args.n_gen)
    return placer, slicer_of(placer, load, args), load


def slicer_of(placer: Placer, load: Workload, args: argparse.Namespace) -> Slicer:
    prefetch = PAPER if args.prefetch == "layer" else Prefetch(n_slots=args.slots)
    return Slicer(placer._problem(ATTENTION), load, prefetch)


def sliced(placer: Placer, slicer: Slicer, load: Workload, gg: float, cg: float, n_g: int) -> SlicePlan:
    """Every FFN cut alike at the nearest granules, in the layout that is fastest in decode, CC kept twice for n_g where
    that cannot be streamed."""
    problem = placer._problem(ATTENTION)
    placed = cpu(costs_of(problem, load, "mixed", llama_uses_device=False))
    layers: list[tuple[BlockCost, Cut]] = []
    for layouts in slicer.blocks(placed):
        fastest = min(layouts.values(), key=lambda b: sum(gemm.cpu_s(1.0, 1) for gemm in b.gemms))
        extent, step = fastest.block.extent, fastest.block.step
        cc = extent if gg + cg == 0 or not fastest.takes_n_g else round((1 - gg - cg) * extent / step) * step
        streamed = min(round(cg * extent / step) * step, extent - cc) if cc < extent else 0
        if gg < 0.5 / (extent / step):
            streamed = extent - cc
        layers.append((fastest, Cut(cc, streamed, extent - cc - streamed)))
    table = ((least_tokens(load), 0), (load.n_prompt, n_g)) if n_g else ()
    twice = bool(table) and any(block.layout != PLAIN_LAYOUT for block, _ in layers)
    made = tuple(layers)
    weights = sum(block.block.bytes * cut.gg // block.block.extent for block, cut in made)
    staging = staging_bytes(made, slicer.on.prefetch, load.n_ubatch, bool(table))
    return slicer.priced(made, table, twice, weights, staging)


def least_tokens(load: Workload) -> int:
    """Below this many tokens n_g is 0."""
    return max(2, load.n_prompt // 2)


def plan_of(placer: Placer, load: Workload, plan: SlicePlan, slicer: Slicer) -> Plan:
    problem = placer._problem(ATTENTION)
    whole = cpu(costs_of(problem, load, "mixed", llama_uses_device=False))
    placed = slicer.placed(whole, plan)
    return placer._plan_of(decide_as_given(problem, placed, load, "manual"), ATTENTION)


#
# traces
#


def traced(placer: Placer, plan: Plan, args: argparse.Namespace, of: TraceOf | None = None) -> list[Span]:
    """The steps of args.rounds runs, after one that is thrown away. of: None: all that can be seen of the device."""
    of = of or trace_of(args.device)
    split = load_bridge().split()
    everywhere = tuple(os.sched_getaffinity(0))
    with placer.engine(plan) as engine:
        pin_threads(args.cpus)  # a worker stays where its --device says
        prompt = lasting_prompt(engine, args.n_prompt, args.n_gen)
        split.start_trace(of=of)
        for _ in range(args.rounds):
            engine.generate(prompt, max_tokens=args.n_gen, temperature=0.0)
        spans = split.stop_trace()
    pin_threads(everywhere)
    return spans


def phases_of(spans: Sequence[Span], n_tokens: int) -> dict[int, list[Span]]:
    """Steps by phase, of FFNs in passes over so many tokens."""
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.n_tokens == n_tokens and "ffn" in span.name:
            found[span.phase].append(span)
    return dict(found)


def t_fin(steps: Sequence[Span]) -> float:
    own = [s for s in steps if s.step in CALLER]
    return max(s.end_s for s in own) - min(s.begin_s for s in own)


def one_pass(spans: Sequence[Span], n_tokens: int) -> list[Span]:
    """The last pass over so many tokens, or the last but one: copies for the pass after it are then seen too. It begins
    with the first block, which is the only one that all passes begin with, and ends where the next pass begins."""
    starts = {s.phase: s for s in sorted(spans, key=lambda s: s.begin_s, reverse=True)}
    first = starts[min(starts)].name
    begins = sorted(phase for phase, span in starts.items() if span.name == first)
    passes = [(b, e) for b, e in zip(begins, [*begins[1:], max(starts) + 1], strict=True)
              if starts[b].n_tokens == n_tokens]  # fmt: skip
    begin, end = passes[max(-2, -len(passes))]
    return sorted((s for s in spans if begin <= s.phase < end), key=lambda s: s.begin_s)


def busy(spans: Sequence[Span], steps: Sequence[str]) -> float:
    return sum(s.end_s - s.begin_s for s in spans if s.step in steps)


def predicted_t_fin(plan: SlicePlan, slicer: Slicer, n_tokens: int) -> float:
    """Of the FFNs that see every token, in the last of three rounds."""
    rounds = 1 if n_tokens > 1 else 3
    ends = slicer.timeline(plan, n_tokens, rounds).block_ends_s
    n = len(plan.layers)
    last = [0.0, *ends][-n - 1 :]
    times = []
    for i, (block, cut) in enumerate(plan.layers):
        if block.takes_n_g and (n_tokens == 1 or not block.outputs_only):
            n_g = n_g_at(plan.token_assignment, n_tokens)
            gap = slicer.on.block_times(block, cut, n_tokens, n_g, 1).gap_s
            times.append(last[i + 1] - last[i] - gap)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("random", "streams", "contention"))
    parser.add_argument("model")
    parser.add_argument("--device", default="rpc-worker:1:1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpus", type=parse_cpus, default=(), help="of the engine, such as 0")
    parser.add_argument("-p", "--n-prompt", type=int, default=128)
    parser.add_argument("-n", "--n-gen", type=int, default=8)
    parser.add_argument("-r", "--rounds", type=int, default=2)
    parser.add_argument("--n", type=int, default=20, help="random cuts")
    parser.add_argument("--passes", type=int, default=1, help="of `random`, through all cuts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gg", type=float, default=0.25, help="r_GG of `streams`")
    parser.add_argument("--cg", type=float, default=0.1, help="r_CG of `streams`")
    parser.add_argument("--n-g", type=float, default=0.25, help="n_g of `streams`, as a share of the prompt")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--prefetch", choices=("ahead", "layer"), default="ahead")
    parser.add_argument("-o", "--out", required=True)
    args = parser.parse_args()
    measured = {"random": measure_random, "streams": measure_streams, "contention": measure_contention}[args.what](args)
    machine = {"system": platform.platform(), "device": args.device, "threads": args.threads}
    document = {"what": args.what, "model": Path(args.model).name, "machine": machine, "slots": args.slots,
                "prefetch": args.prefetch, "rounds": args.rounds, **measured}  # fmt: skip
    Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
