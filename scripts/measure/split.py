"""The split back end beside `oallama bench`: what it costs by itself, where a token's time goes, what loading takes."""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from experiments.child import ROOT, run_child
from experiments.generation import Sample, best_layout, generations, interleaved, pinned, prompt_of

from measure.measure import Measure, Step, add_common, column, name_of, ratio_text
from oallama import Placer, Plan
from oallama.core.types import PLAIN_LAYOUT, SPLIT_LAYOUT, OperatorPlacement, Phase
from oallama.cost.block_cost import Cut, block_costs
from oallama.cost.blocks import split_blocks
from oallama.cost.passes import passes
from oallama.cost.placement import placement_seconds
from oallama.cost.slice_rates import slice_rates
from oallama.cost.slices import Pricing
from oallama.cost.transfer import NO_TRANSFER
from oallama.device.spec import parse_cpus
from oallama.model.cut import cut_extent
from oallama.place.problem import costs_of
from oallama.place.record import placed_by_plan
from oallama.plan.plugin_text import plugin_text

#
# the host side alone
#


def _host_steps(options: argparse.Namespace) -> Iterator[Step]:
    for path in options.files:
        for threads in options.threads:
            yield Step(f"{name_of(path)}, {threads} threads", path, partial(_host, path, threads, options))


def _host(path: str, threads: int, options: argparse.Namespace) -> dict[str, list[Sample]]:
    """Every operator in the split buffer with CC = 1, in the layout that llama.cpp would choose, against stock."""
    import llama_cpp.llama_cpp as api

    from oallama.device.load_params import LoadSettings, ModelParams, load_bridge
    from oallama.run.placed_llama import PlacedLlama

    bridge = load_bridge()
    placer = Placer.load(path, device="none", threads=threads)
    operators = [o for o in placer.operators if o.name != "token_embd.weight"]
    plan = placer.cpu_plan(n_prompt=options.n_prompt, n_gen=options.n_gen)
    placements = {o.name: OperatorPlacement(o.name, 0.0, 0.0, 1.0, best_layout(o, cut_extent(o))) for o in operators}
    record = replace(plan, operators=tuple(placements.get(p.name, p) for p in plan.operators))
    text = plugin_text(record, operators, "CPU", every_operator=True)
    settings = LoadSettings(path=path, n_ctx=options.n_prompt + options.n_gen + 8, n_threads=threads)
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
    prompt = prompt_of(options.n_prompt, placer.model.n_vocab)
    bridge.split().reset_stats()
    samples = interleaved({n: _decoder(llama, prompt, options.n_gen) for n, llama in llamas.items()}, options.rounds)
    if bridge.split().stats().n_graphs == 0:
        raise SystemExit("the split backend computed nothing")
    for llama in llamas.values():
        llama.close()
    return samples


def _decoder(llama: Any, prompt: list[int], n_gen: int) -> Callable[[], Sample]:
    """Decodes the prompt, and then a token n_gen times, whatever the model says."""
    import llama_cpp.llama_cpp as api

    batch = (ctypes.c_int32 * len(prompt))(*prompt)
    token = (ctypes.c_int32 * 1)(prompt[0])

    def decode(tokens: Any, n_tokens: int) -> None:
        if api.llama_decode(llama.ctx, api.llama_batch_get_one(tokens, n_tokens)) != 0:
            raise SystemExit("llama.cpp could not decode")

    def run() -> Sample:
        api.llama_memory_clear(api.llama_get_memory(llama.ctx), True)
        start = time.perf_counter()
        decode(batch, len(prompt))
        first = time.perf_counter()
        for _ in range(n_gen):
            decode(token, 1)
        return {"prefill_s": first - start, "decode_s": (time.perf_counter() - first) / n_gen}

    return run


def _host_rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    return [
        (step, phase, f"{1e3 * median(column(samples['stock'], key)):.3g}",
         f"{1e3 * median(column(samples['split'], key)):.3g}",
         ratio_text(column(samples["stock"], key), column(samples["split"], key)))
        for step, samples in found for phase, key in (("prefill", "prefill_s"), ("decode", "decode_s"))
    ]  # fmt: skip


#
# where a token's time goes
#


def _stage_steps(options: argparse.Namespace) -> Iterator[Step]:
    for file in options.files:
        yield Step(Path(file).name, file, partial(_stages, file, options))


def _stages(file: str, options: argparse.Namespace) -> dict[str, Any]:
    """Samples of TTFT, TPOT and a token's stages, and the bound of both."""
    plan = Plan.load(file)
    placer = Placer.load(plan.model_path, device=plan.device, threads=options.threads[0])
    with placer.engine(plan) as engine, pinned(options.cpus):
        prompt = prompt_of(options.n_prompt, placer.model.n_vocab)
        samples = generations(engine, prompt, options.n_gen, options.rounds)
    if "host_s" not in samples[0]:
        raise SystemExit(f"{file} splits nothing")
    return {"bound": bound_of(placer, plan, options.n_prompt, options.n_gen), "samples": samples}


def bound_of(placer: Placer, plan: Plan, n_prompt: int, n_gen: int) -> Sample:
    """TTFT and TPOT of the same placement with the profile's rates for computing, and nothing for launching, copying,
    joining."""
    attention = plan.attention
    problem = placer._problem("auto" if attention is None else attention.flash_attn)
    load = replace(plan.workload, n_prompt=n_prompt, n_gen=n_gen)
    placed = placed_by_plan(placer.model.n_layer, placer.operators, plan)
    gg = placed.slices.gg if placed.slices else (0,) * len(placer.operators)
    blocks = split_blocks(placer.operators, gg)
    sliced = frozenset(i for block in blocks for i in block.operators)
    free = Pricing(replace(slice_rates(problem.profile), transfer=NO_TRANSFER, join_s_per_byte=0.0))
    seconds = {}
    phases: tuple[tuple[str, Phase], ...] = (("ttft_s", "prefill"), ("tpot_s", "decode"))
    for key, phase in phases:
        costs = replace(costs_of(problem, load, phase), rates=NO_TRANSFER)
        total = placement_seconds(costs, placed.on_device, placed.first_device_layer, sliced)
        for block in blocks:
            by_layout = block_costs(problem.kernels, placer.operators, block)
            cut = Cut(block.extent - gg[block.operators[0]], 0, gg[block.operators[0]])
            of = by_layout.get(plan.operators[block.operators[0]].layout or PLAIN_LAYOUT) or by_layout[PLAIN_LAYOUT]
            total += sum(p.count * free.seconds(of, cut, p.n_tokens, 0, p.n_outputs) for p in passes(load, phase))
        seconds[key] = total
    return seconds


def _stage_rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for step, data in found:
        middle = {key: median(column(data["samples"], key)) for key in data["samples"][0]}
        stages = (f"{1e3 * middle[key]:.2f}" for key in ("tpot_s", "host_s", "wait_s", "launch_s", "join_s"))
        share = (f"{data['bound'][key] / middle[key]:.0%}" for key in ("tpot_s", "ttft_s"))
        rows.append((step, *stages, f"{middle['phases']:.0f}", *share))
    return rows


#
# memory at the load
#

_PEAK = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024
"""
_EMPTY = f"import ggml_bridge, oallama, numpy\nggml_bridge.load().split(){_PEAK}print(peak)"
_LOAD = f"""
import sys
from oallama import Placer, Plan
plan = Plan.load(sys.argv[1])
placer = Placer.load(plan.model_path, device=plan.device, threads=int(sys.argv[2]))
engine = placer.engine(plan, n_ctx=64)
{_PEAK}
print(peak, engine.memory.device_bytes)
engine.close()
"""


def _memory_steps(options: argparse.Namespace) -> Iterator[Step]:
    for file in options.files:
        yield Step(Path(file).name, file, partial(_memory, file, options))


def _memory(file: str, options: argparse.Namespace) -> dict[str, int]:
    """Peak resident memory of a process that loads the plan, file pages and buffers for 64 tokens included, and of one
    that loads nothing. What a worker holds is the device's, and comes on top."""
    plan = Plan.load(file)
    (empty,) = _printed(_EMPTY)
    peak, device = _printed(_LOAD, file, str(options.threads[0]))
    return {
        "file_bytes": Path(plan.model_path).stat().st_size,
        "largest_tensor_bytes": max(o.bytes for o in Placer.load(plan.model_path).operators),
        "peak_bytes": peak, "python_bytes": empty, "device_bytes": device,
    }  # fmt: skip


def _printed(program: str, *arguments: str) -> list[int]:
    ended = run_child([sys.executable, "-c", program, *arguments], None, ROOT / "build" / "measure" / "log.txt")
    if ended.status != 0:
        raise SystemExit(ended.why)
    return [int(word) for word in ended.out.split()]


def _memory_rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for step, of in found:
        size, engine = of["file_bytes"], of["peak_bytes"] - of["python_bytes"]
        limit = 1.05 + of["largest_tensor_bytes"] / size
        rows.append((step, f"{engine / size:.3f}", f"{(engine + of['device_bytes']) / size:.3f}", f"{limit:.3f}"))
    return rows


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "PLAN", n_prompt=256)
    parser.add_argument("--cpus", type=parse_cpus, default=(), help="of the engine, such as 0")


MEASURES = {
    "split-host": Measure(
        "all weights on the split back end's host side against stock, in one process",
        partial(add_common, n_prompt=256), _host_steps, ("model", "phase", "stock ms", "all CC ms", "times as fast"),
        _host_rows,
    ),
    "split-stages": Measure(
        "where a token's time goes, against what the profile allows", _add_plan_options, _stage_steps,
        ("plan", "TPOT ms", "CC", "waiting", "launching", "joining", "phases", "of the bound: TPOT", "TTFT"),
        _stage_rows,
    ),
    "split-memory": Measure(
        "peak memory while a plan is loaded, against the file", _add_plan_options, _memory_steps,
        ("plan", "engine, in files", "with the device", "limit"), _memory_rows,
    ),
}  # fmt: skip
