#!/usr/bin/env python3
"""Measure what docs/benchmarks.md says of whole-operator placement; raw samples go to a JSON file.

Arms run interleaved (A B B A ...) in one process on one machine, ratios are taken within a round, medians over rounds.

    scripts/measure_foundation.py cpu MODEL ...      # tokens/s of `oallama run` on the CPU against stock
    scripts/measure_foundation.py logits MODEL ...   # bit-identity on the CPU, NMSE with operators on the device
    scripts/measure_foundation.py policies MODEL     # oato against layers at 25, 50, 75 % of the weights on the device
    scripts/measure_foundation.py predict MODEL      # predicted against measured time of random placements
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from oallama import Placer

Sample = dict[str, float]


def prompt_of(n_tokens: int, n_vocab: int, seed: int = 7) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, min(n_vocab, 1000), n_tokens)]


def lasting_prompt(engine: Any, n_prompt: int, n_gen: int) -> list[int]:
    """A prompt that the model continues for n_gen tokens without ending."""
    for seed in range(100):
        prompt = prompt_of(n_prompt, engine.n_vocab, seed)
        if engine.generate(prompt, max_tokens=n_gen, temperature=0.0).n_gen == n_gen:
            return prompt
    raise SystemExit(f"the model always ends before {n_gen} tokens; lower -n")


def interleaved(arms: dict[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Every arm once a round, the order reversed every other round; one round of warm-up is thrown away."""
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for i in tqdm(range(rounds + 1), unit="round", disable=not sys.stderr.isatty()):
        order = list(arms.items())
        for name, run in order if i % 2 else reversed(order):
            sample = run()
            if i:
                samples[name].append(sample)
    return samples


def ratio(samples: dict[str, list[Sample]], of: str, to: str, key: str) -> dict[str, float]:
    """Median over rounds of of/to within a round, and the quartiles."""
    ratios = [a[key] / b[key] for a, b in zip(samples[of], samples[to], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "q1": low, "q3": high}


def stock_arm(path: str, prompt: list[int], n_gen: int, n_ctx: int, threads: int) -> Callable[[], Sample]:
    import llama_cpp

    llama = llama_cpp.Llama(path, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run() -> Sample:
        llama.reset()
        start = time.perf_counter()
        generated = llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        next(generated)
        first = time.perf_counter()
        for _ in range(n_gen - 1):
            next(generated)
        end = time.perf_counter()
        return {"ttft_s": first - start, "tpot_s": (end - first) / (n_gen - 1)}

    return run


def engine_arm(engine: Any, prompt: list[int], n_gen: int) -> Callable[[], Sample]:
    def run() -> Sample:
        made = engine.generate(prompt, max_tokens=n_gen, temperature=0.0)
        if made.n_gen < n_gen:
            raise SystemExit(f"the model ended after {made.n_gen} tokens; choose another prompt")
        return {"ttft_s": made.ttft_s, "tpot_s": made.tpot_s}

    return run


def measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    results = []
    for path in args.models:
        placer = Placer.load(path, device="none", threads=args.threads)
        n_prompt = min(args.n_prompt, (placer.model.n_ctx_train or 4096) - args.n_gen)
        plan = placer.cpu_plan(n_prompt=n_prompt, n_gen=args.n_gen)
        with placer.engine(plan) as engine:
            prompt = lasting_prompt(engine, n_prompt, args.n_gen)
            arms = {
                "stock": stock_arm(path, prompt, args.n_gen, plan.workload.n_ctx, args.threads),
                "oallama": engine_arm(engine, prompt, args.n_gen),
            }
            samples = interleaved(arms, args.rounds)
        speed = {key: ratio(samples, "stock", "oallama", key) for key in ("ttft_s", "tpot_s")}
        results.append(
            {"model": Path(path).name, "n_prompt": n_prompt, "n_gen": args.n_gen, "speed": speed, "samples": samples}
        )
        for name, key, n in (("prefill", "ttft_s", n_prompt), ("decode", "tpot_s", 1)):
            medians = {arm: n / statistics.median(s[key] for s in samples[arm]) for arm in samples}
            print(f"{Path(path).name} {name}: stock {medians['stock']:.1f} t/s, oallama {medians['oallama']:.1f} t/s, "
                  f"ratio {speed[key]['median']:.3f} ({speed[key]['q1']:.3f}..{speed[key]['q3']:.3f})")  # fmt: skip
    return {"results": results}


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.mean((a - b) ** 2) / np.mean(b**2))


def stock_on_device(path: str, plan: Any, prompt: list[int], threads: int) -> np.ndarray:
    """Logits of stock llama.cpp with the same operators on a worker of its own, told so name by name."""
    import ctypes

    import llama_cpp.llama_cpp as api

    import ggml_bridge
    from ggml_bridge.rpc import RpcServer

    bridge = ggml_bridge.load()
    with RpcServer(threads=1) as server:
        (device,) = bridge.rpc_add(server.endpoint)
        host = [p.name for p in plan.operators if p.gg == 0]

        class Override(ctypes.Structure):
            _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]

        overrides = (Override * (len(host) + 1))()
        for entry, name in zip(overrides, host, strict=False):
            entry.pattern, entry.buft = f"^{name}$".replace(".", "\\.").encode(), bridge.layout_buft("CPU")
        devices = (ctypes.c_void_p * 2)(bridge.device_ptr(device), None)
        params = api.llama_model_default_params()
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        params.n_gpu_layers = plan.n_gpu_layers
        model = api.llama_model_load_from_file(path.encode(), params)
        context_params = api.llama_context_default_params()
        context_params.n_ctx = plan.workload.n_ctx
        context_params.n_threads = context_params.n_threads_batch = threads
        context = api.llama_init_from_model(model, context_params)
        batch = api.llama_batch_init(len(prompt), 0, 1)
        batch.n_tokens = len(prompt)
        for i, token in enumerate(prompt):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if api.llama_decode(context, batch) != 0:
            raise SystemExit("stock llama.cpp could not decode")
        n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(prompt), n_vocab)).copy()
        api.llama_batch_free(batch)
        api.llama_free(context)
        api.llama_model_free(model)
    return logits


def measure_logits(args: argparse.Namespace) -> dict[str, Any]:
    import llama_cpp

    results = []
    for path in args.models:
        host = Placer.load(path, device="none", threads=args.threads)
        prompt = prompt_of(min(args.n_prompt, 128), host.model.n_vocab)
        plan = host.plan("cpu", n_prompt=len(prompt), n_gen=1)
        with host.engine(plan) as engine:
            ours = engine.logits(prompt)
        stock = llama_cpp.Llama(
            path, n_ctx=plan.workload.n_ctx, n_threads=args.threads, n_threads_batch=args.threads, logits_all=True,
            verbose=False,
        )  # fmt: skip
        stock.eval(prompt)
        reference = np.array(stock.scores[: len(prompt)])
        row: dict[str, Any] = {"model": Path(path).name, "cpu_bit_identical": bool(np.array_equal(ours, reference))}
        placer = Placer.load(path, device=args.device, threads=args.threads, gpu_weights=0.5)
        placed = placer.plan("oato", n_prompt=len(prompt), n_gen=1, fill="full")
        with placer.engine(placed) as engine:
            row["device_operators"] = sum(p.gg == 1 for p in placed.operators)
            on_device = engine.logits(prompt)
        # in a process of its own: ggml keeps asking the devices of a server that has ended
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            same = pool.submit(stock_on_device, path, placed, prompt, args.threads).result()
        row["nmse_against_stock_same_device"] = nmse(on_device, same)
        row["nmse_device_against_cpu"] = nmse(on_device, reference)
        results.append(row)
        print(row)
    return {"results": results}


def measure_policies(args: argparse.Namespace) -> dict[str, Any]:
    results = []
    (path,) = args.models
    for share in (0.25, 0.5, 0.75):
        placer = Placer.load(path, device=args.device, threads=args.threads, gpu_weights=share)
        prompt = prompt_of(args.n_prompt, placer.model.n_vocab)
        plans = {
            "layers": placer.plan("layers", n_prompt=args.n_prompt, n_gen=args.n_gen),
            "oato-full": placer.plan("oato", n_prompt=args.n_prompt, n_gen=args.n_gen, fill="full"),
            "oato": placer.plan("oato", n_prompt=args.n_prompt, n_gen=args.n_gen),
        }
        engines = {name: placer.engine(plan) for name, plan in plans.items()}
        try:
            arms = {name: engine_arm(engine, prompt, args.n_gen) for name, engine in engines.items()}
            samples = interleaved(arms, args.rounds)
        finally:
            for engine in engines.values():
                engine.close()
        row: dict[str, Any] = {"gpu_weights": share, "samples": samples}
        for name, plan in plans.items():
            medians = {key: statistics.median(s[key] for s in samples[name]) for key in ("ttft_s", "tpot_s")}
            row[name] = {
                "weights_gpu": plan.memory.weights_gpu,
                "n_gpu_layers": plan.n_gpu_layers,
                "predicted": {"ttft_s": plan.predicted.ttft_s, "tpot_s": plan.predicted.tpot_s},
                "measured": medians,
                "speed_against_layers": {key: ratio(samples, "layers", name, key) for key in medians},
            }
            print(share, name, row[name])
        results.append(row)
    return {"n_prompt": args.n_prompt, "n_gen": args.n_gen, "results": results}


def measure_predictions(args: argparse.Namespace) -> dict[str, Any]:
    (path,) = args.models
    placer = Placer.load(path, device=args.device, threads=args.threads)
    prompt = prompt_of(args.n_prompt, placer.model.n_vocab)
    rng = random.Random(args.seed)
    rows = []
    for i in tqdm(range(args.placements), unit="placement", disable=not sys.stderr.isatty()):
        gpu_layers = rng.choice((placer.model.n_layer + 1, rng.randint(1, placer.model.n_layer + 1)))
        share = rng.random()
        first = placer.model.n_layer + 1 - gpu_layers
        chosen = [
            op.name
            for op in placer.operators
            if (placer.model.n_layer if op.layer is None else op.layer) >= first and rng.random() < share
        ]
        plan = placer.plan_of(chosen, gpu_layers, n_prompt=args.n_prompt, n_gen=args.n_gen)
        with placer.engine(plan) as engine:
            samples = interleaved({"oallama": engine_arm(engine, prompt, args.n_gen)}, args.rounds)["oallama"]
        row: dict[str, Any] = {"placement": i, "gpu_layers": gpu_layers, "operators": chosen, "samples": samples}
        for key, predicted in (("ttft_s", plan.predicted.ttft_s), ("tpot_s", plan.predicted.tpot_s)):
            measured = statistics.median(s[key] for s in samples)
            row[key] = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        total = row["ttft_s"]["measured"] + args.n_gen * row["tpot_s"]["measured"]
        row["total_s"] = {
            "predicted": plan.predicted.total_s, "measured": total, "error": plan.predicted.total_s / total - 1
        }  # fmt: skip
        rows.append(row)
        print(i, len(chosen), {key: round(row[key]["error"], 3) for key in ("ttft_s", "tpot_s", "total_s")})
    summary = {}
    for key in ("ttft_s", "tpot_s", "total_s"):
        errors = sorted(abs(row[key]["error"]) for row in rows)
        summary[key] = {"median_error": statistics.median(errors), "worst_error": errors[-1]}
    print(json.dumps(summary, indent=1))
    return {"n_prompt": args.n_prompt, "n_gen": args.n_gen, "summary": summary, "results": rows}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    from oallama.profile.machine import fingerprint

    return {"platform": platform.platform(), **fingerprint(args.threads, args.device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "logits", "policies", "predict"))
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--device", default="rpc-worker:1:1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-p", "--n-prompt", type=int, default=64)
    parser.add_argument("-n", "--n-gen", type=int, default=32)
    parser.add_argument("-r", "--rounds", type=int, default=8)
    parser.add_argument("--placements", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    work = {
        "cpu": measure_cpu, "logits": measure_logits, "policies": measure_policies, "predict": measure_predictions
    }  # fmt: skip
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result = work[args.what](args)
    if args.output:
        settings = {k: v for k, v in vars(args).items() if k not in ("output", "models")}
        settings["models"] = [Path(model).name for model in args.models]
        document = {"what": args.what, "started": started, "settings": settings, "machine": machine(args), **result}
        args.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
