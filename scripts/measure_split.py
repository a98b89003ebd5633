#!/usr/bin/env python3
"""Measure what docs/benchmarks.md says of the split backend beside `oallama bench`; raw samples go to a JSON file.

    scripts/measure_split.py host MODEL ...     # all weights on the backend's host side against stock, in one process
    scripts/measure_split.py stages PLAN ...    # where a token's time goes, against what the profile allows
    scripts/measure_split.py memory PLAN ...    # peak memory while a plan is loaded, against the file

Arms run interleaved (A B B A ...), ratios are taken within a round, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure_foundation import Sample, interleaved, prompt_of, ratio

from oallama import Placer, Plan
from oallama.bench.child import pin_threads
from oallama.core.types import SPLIT_LAYOUT, Operator, OperatorPlacement
from oallama.cost.blocks import split_blocks
from oallama.cost.kernels import PLAIN_LAYOUT
from oallama.cost.passes import passes
from oallama.cost.placement import placement_seconds
from oallama.cost.slices import Cut, Pricing, block_costs, slice_rates
from oallama.cost.transfer import NO_TRANSFER
from oallama.device.spec import parse_cpus
from oallama.place.problem import costs_of
from oallama.place.record import placed_by_plan
from oallama.plan.plugin_text import plugin_text


def measure_host(args: argparse.Namespace) -> dict[str, Any]:
    return {"results": [host_against_stock(args, path, t) for path in args.files for t in args.threads]}


def host_against_stock(args: argparse.Namespace, path: str, threads: int) -> dict[str, Any]:
    """Every operator in the split buffer with CC = 1, in the layout that llama.cpp would choose, against stock."""
    import ctypes

    import llama_cpp.llama_cpp as api

    from oallama.device.load_params import LoadSettings, ModelParams, load_bridge
    from oallama.run.placed_llama import PlacedLlama

    bridge = load_bridge()
    placer = Placer.load(path, device="none", threads=threads)
    operators = [o for o in placer.operators if o.name != "token_embd.weight"]
    plan = placer.cpu_plan(n_prompt=args.n_prompt, n_gen=args.n_gen)
    placements = {o.name: OperatorPlacement(o.name, 0.0, 0.0, 1.0, best_layout(bridge, o)) for o in operators}
    record = replace(plan.record, operators=tuple(placements.get(p.name, p) for p in plan.operators))
    text = plugin_text(record, operators, "CPU", every_operator=True)
    n_ctx = args.n_prompt + args.n_gen + 8
    settings = LoadSettings(path=path, n_ctx=n_ctx, n_threads=threads)
    names = "|".join(o.name.replace(".", "\\.") for o in operators)
    with bridge.split().plan(text) as split:
        ours = replace(settings, host_patterns=((f"^({names})$", SPLIT_LAYOUT),))
        no_progress = api.llama_progress_callback(lambda share, data: True)
        llamas = {
            "stock": PlacedLlama.load(settings, ModelParams(settings, 0, bridge), threads, no_progress),
            "split": PlacedLlama.load(ours, ModelParams(ours, 0, bridge, split.buft), threads, no_progress),
        }
        if not all(s.loaded for s in split.slices()):
            raise SystemExit("not every operator lies in the split buffer")
    prompt = prompt_of(args.n_prompt, placer.model.n_vocab)

    def arm(llama: Any) -> Any:
        batch = (ctypes.c_int32 * len(prompt))(*prompt)
        token = (ctypes.c_int32 * 1)(prompt[0])

        def run() -> Sample:
            api.llama_memory_clear(api.llama_get_memory(llama.ctx), True)
            start = time.perf_counter()
            decode(api, llama.ctx, api.llama_batch_get_one(batch, len(prompt)))
            first = time.perf_counter()
            for _ in range(args.n_gen):
                decode(api, llama.ctx, api.llama_batch_get_one(token, 1))
            end = time.perf_counter()
            return {"prefill_s": first - start, "decode_s": (end - first) / args.n_gen}

        return run

    bridge.split().reset_stats()
    samples = interleaved({name: arm(llama) for name, llama in llamas.items()}, args.rounds)
    if bridge.split().stats().n_graphs == 0:
        raise SystemExit("the split backend computed nothing")
    speed = {key: ratio(samples, "stock", "split", key) for key in ("prefill_s", "decode_s")}
    for llama in llamas.values():
        llama.close()
    name = Path(path).name
    for key, n in (("prefill_s", args.n_prompt), ("decode_s", 1)):
        rates = {arm: n / statistics.median(s[key] for s in samples[arm]) for arm in samples}
        print(f"{name} {threads} threads {key[:-2]}: stock {rates['stock']:.1f} t/s, all-CC {rates['split']:.1f} t/s, "
              f"ratio {speed[key]['median']:.3f} ({speed[key]['q1']:.3f}..{speed[key]['q3']:.3f})")  # fmt: skip
    return {"model": name, "threads": threads, "n_prompt": args.n_prompt, "n_gen": args.n_gen, "speed": speed,
            "samples": samples}  # fmt: skip


def decode(api: Any, context: Any, batch: Any) -> None:
    if api.llama_decode(context, batch) != 0:
        raise SystemExit("llama.cpp could not decode")


def best_layout(bridge: Any, operator: Operator) -> str:
    """The first layout llama.cpp would take for the whole operator."""
    k, n, e = operator.shape
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 0
    for layout in bridge.cpu_layouts():
        if layout == "CPU" or ((e == 1 or used) and bridge.layout_supports(layout, operator.type, k, n, e, used)):
            return str(layout)
    raise SystemExit("there is no CPU layout")


def measure_stages(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per decoded token in launch, CC, wait, join; TTFT and TPOT against the bound: the same placement with the
    profile's rates for computing, and nothing for launching, copying, joining."""
    rows = []
    for file in args.files:
        plan = Plan.load(file)
        placer = Placer.load(plan.record.model_path, device=plan.device, threads=args.threads[0])
        prompt = prompt_of(args.n_prompt, placer.model.n_vocab)
        bound = bound_of(placer, plan, args.n_prompt, args.n_gen)
        made = []
        everywhere = tuple(os.sched_getaffinity(0))
        with placer.engine(plan) as engine:
            pin_threads(args.cpus)  # a worker stays where its --device says
            for i in range(args.rounds + 1):
                generation = engine.generate(prompt, max_tokens=args.n_gen, temperature=0.0, seed=i)
                stats = engine.split_stats
                if stats is None or generation.n_gen < args.n_gen:
                    raise SystemExit("the plan splits nothing, or the model ends too early")
                if i:
                    made.append({"ttft_s": generation.ttft_s, "tpot_s": generation.tpot_s, **stats.per_token(),
                                 "phases": stats.decode.n_phases / stats.n_decoded})  # fmt: skip
        pin_threads(everywhere)
        medians = {key: statistics.median(m[key] for m in made) for key in made[0]}
        share = {"ttft": bound["ttft_s"] / medians["ttft_s"], "tpot": bound["tpot_s"] / medians["tpot_s"]}
        rows.append({"plan": Path(file).name, "medians": medians, "bound": bound, "of_bound": share, "samples": made})
        print(f"{Path(file).name}: TPOT {1e3 * medians['tpot_s']:.2f} ms, {100 * share['tpot']:.0f} % of the bound; a "
              f"token: CC {1e3 * medians['host_s']:.2f} ms, waiting {1e3 * medians['wait_s']:.2f}, launching "
              f"{1e3 * medians['launch_s']:.2f}, joining {1e3 * medians['join_s']:.2f} ms in "
              f"{medians['phases']:.0f} phases; TTFT {1e3 * medians['ttft_s']:.0f} ms, "
              f"{100 * share['ttft']:.0f} %")  # fmt: skip
    return {"n_prompt": args.n_prompt, "n_gen": args.n_gen, "results": rows}


def bound_of(placer: Placer, plan: Plan, n_prompt: int, n_gen: int) -> dict[str, float]:
    attention = plan.record.attention
    problem = placer._problem("auto" if attention is None else attention.flash_attn)
    load = replace(plan.workload, n_prompt=n_prompt, n_gen=n_gen)
    placed = placed_by_plan(placer.model.n_layer, placer.operators, plan.record)
    gg = placed.slices.gg if placed.slices else (0,) * len(placer.operators)
    blocks = split_blocks(placer.operators, gg)
    sliced = frozenset(i for block in blocks for i in block.operators)
    free = Pricing(replace(slice_rates(problem.profile), transfer=NO_TRANSFER, join_s_per_byte=0.0))
    seconds = {}
    for key, phase in (("ttft_s", "prefill"), ("tpot_s", "decode")):
        costs = replace(costs_of(problem, load, phase), rates=NO_TRANSFER)
        total = placement_seconds(costs, placed.on_device, placed.first_device_layer, sliced)
        for block in blocks:
            by_layout = block_costs(problem.kernels, placer.operators, block)
            cut = Cut(block.extent - gg[block.operators[0]], 0, gg[block.operators[0]])
            of = by_layout.get(plan.operators[block.operators[0]].layout or PLAIN_LAYOUT) or by_layout[PLAIN_LAYOUT]
            total += sum(p.count * free.seconds(of, cut, p.n_tokens, 0, p.n_outputs) for p in passes(load, phase))
        seconds[key] = total
    return seconds


_LOAD = """
import sys
from oallama import Placer, Plan
from oallama.bench.child import pin_threads
plan = Plan.load(sys.argv[1])
placer = Placer.load(plan.record.model_path, device=plan.device, threads=int(sys.argv[2]))
with placer.engine(plan, n_ctx=64) as engine:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024, engine.memory.device_bytes)
"""


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak resident memory of the process that loads, file pages and buffers for 64 tokens included, beyond that of a
    process that loads nothing. What the worker holds is the device's, and comes on top."""
    rows = []
    (empty,) = peak_of([sys.executable, "-c", _EMPTY])
    for file in args.files:
        plan = Plan.load(file)
        size = Path(plan.record.model_path).stat().st_size
        largest = max(o.bytes for o in Placer.load(plan.record.model_path).operators)
        peak, device = peak_of([sys.executable, "-c", _LOAD, file, str(args.threads[0])])
        limit = int(1.05 * size) + largest
        rows.append({"plan": Path(file).name, "file_bytes": size, "largest_tensor_bytes": largest, "peak_bytes": peak,
                     "python_bytes": empty, "device_bytes": device, "limit_bytes": limit})  # fmt: skip
        print(f"{Path(file).name}: the engine's peak is {(peak - empty) / size:.3f} of the file, with what the device "
              f"holds {(peak - empty + device) / size:.3f}; limit {limit / size:.3f}")  # fmt: skip
    return {"results": rows}


_EMPTY = """
import ggml_bridge, oallama, numpy
ggml_bridge.load().split()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def peak_of(command: list[str]) -> list[int]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def main() -> None:
    measures = {"host": measure_host, "stages": measure_stages, "memory": measure_memory}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(measures))
    parser.add_argument("files", nargs="+", metavar="MODEL|PLAN")
    parser.add_argument("-t", "--threads", type=lambda text: [int(t) for t in text.split(",")], default=[1])
    parser.add_argument("-p", "--n-prompt", type=int, default=256)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-r", "--rounds", type=int, default=8)
    parser.add_argument("--cpus", type=parse_cpus, default=(), help="of the engine in `stages`, such as 0")
    parser.add_argument("-o", "--output", help="raw samples as JSON")
    args = parser.parse_args()
    result = {"what": args.what, "machine": platform.processor() or platform.machine(), **measures[args.what](args)}
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
