"""Logits of ours against stock llama.cpp's: bit-identity on the CPU, NMSE with operators on the device."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.generation import prompt_of

from measure.measure import Measure, Step, add_common, name_of
from oallama import Placer, Plan

Logits = npt.NDArray[np.float32]


def _steps(options: argparse.Namespace) -> Iterator[Step]:
    for path in options.files:
        yield Step(name_of(path), path, partial(_measure, path, options))


def _measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    import llama_cpp

    (threads,) = options.threads
    host = Placer.load(path, device="none", threads=threads, flash_attn="off")  # as llama-cpp-python leaves it
    prompt = prompt_of(min(options.n_prompt, 128), host.model.n_vocab)
    plan = host.plan("cpu", n_prompt=len(prompt), n_gen=1)
    with host.engine(plan) as engine:
        ours = engine.logits(prompt)
    stock = llama_cpp.Llama(
        path, n_ctx=plan.workload.n_ctx, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
    )
    stock.eval(prompt)
    reference = np.array(stock.scores[: len(prompt)])
    placer = Placer.load(path, device=options.device, threads=threads, gpu_weights=0.5)
    placed = placer.plan("oato", n_prompt=len(prompt), n_gen=1, fill="full")
    with placer.engine(placed) as engine:
        on_device = engine.logits(prompt)
    # in a process of its own: ggml keeps asking the devices of a server that has ended
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        same = pool.submit(stock_on_device, path, placed, prompt, threads).result()
    return {
        "cpu_bit_identical": bool(np.array_equal(ours, reference)),
        "device_operators": sum(p.gg == 1 for p in placed.operators),
        "nmse_against_stock_same_device": nmse(on_device, same),
        "nmse_device_against_cpu": nmse(on_device, reference),
    }


def nmse(a: Logits, b: Logits) -> float:
    """Normalised mean squared error of a against b."""
    return float(np.mean((a - b) ** 2) / np.mean(b**2))


def stock_on_device(path: str, plan: Plan, prompt: list[int], threads: int) -> Logits:
    """Logits of stock llama.cpp [n_tokens, n_vocab] with the same operators on a worker of its own, told so name by
    name."""
    import llama_cpp.llama_cpp as api

    import ggml_bridge
    from ggml_bridge.rpc import RpcServer

    bridge = ggml_bridge.load()
    with RpcServer(threads=1) as server:
        (device,) = bridge.rpc_add(server.endpoint)
        host = [p.name for p in plan.operators if p.gg == 0]

        class Override(ctypes.Structure):
            _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))

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
        logits: Logits = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(prompt), n_vocab)).copy()
        api.llama_batch_free(batch)
        api.llama_free(context)
        api.llama_model_free(model)
    return logits


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    return [
        (step, "bit-identical" if row["cpu_bit_identical"] else "differs", row["device_operators"],
         f"{row['nmse_against_stock_same_device']:.1e}", f"{row['nmse_device_against_cpu']:.1e}")
        for step, row in found
    ]  # fmt: skip


MEASURE = Measure(
    "bit-identity with stock llama.cpp on the CPU, NMSE with operators on the device", add_common, _steps,
    ("model", "all CPU against stock", "operators on the device", "NMSE against stock, same device",
     "NMSE against all CPU"), _rows,
)  # fmt: skip
