"""Placements as a server serves them, for tests: a device, the CPU alone, slices, hostile names."""

from __future__ import annotations

from dataclasses import replace

import report_records
from worlds import placed, some_plan, weight

from oallama.core.types import MemoryBreakdown, Predicted
from oallama.report.placement_page import Served, WorkTime

HOSTILE = report_records.HOSTILE
ROLES = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MEMORY = MemoryBreakdown(
    capacity=6_000_000, fill=0.9, limit=5_400_000, weights_gpu=300_000, weights_host=200_000, kv=512_000,
    compute=256_000, staging=0, spare=4_332_000,
)  # fmt: skip


def served(n_layer: int = 3) -> Served:
    """Layer 0 on the CPU, layer 1 with a split FFN, the others and the output on the device."""
    operators = (
        *(weight(role=role, k=256, n=256, layer=layer) for layer in range(n_layer) for role in ROLES),
        weight(role="output", k=256, n=1024, type_name="Q6_K"),
    )
    placements = tuple(
        placed(o.name)
        if o.layer == 0
        else placed(o.name, gg=0.5, cg=0.25)
        if o.layer == 1 and o.role.startswith("ffn")
        else placed(o.name, gg=1.0)
        for o in operators
    )
    times = tuple(
        WorkTime(name=o.name, token_s={stream: 20e-6}, prompt_s={stream: 1e-3})
        for o, p in zip(operators, placements, strict=True)
        for stream in ["gpu" if p.gg == 1 else "cpu"]
        if p.gg in (0, 1)
    )
    cut = WorkTime(name="layer 1: FFN", token_s={"cpu": 30e-6, "gpu": 25e-6}, prompt_s={"gpu": 2e-3})
    record = some_plan(
        placements, model_fingerprint="ab" * 32, device="rpc://127.0.0.1:9", n_gpu_layers=n_layer, memory=MEMORY,
        predicted=Predicted(ttft_s=0.05, tpot_s=0.0004, total_s=0.07),
    )  # fmt: skip
    model = report_records.model(n_layer=n_layer, name="Small")
    return Served(
        model=model,
        operators=operators,
        plan=record,
        reason="this is the placement of policy split",
        times=(*times, cut),
    )


def on_cpu(of: Served) -> Served:
    """The same model without a device and without times."""
    memory_breakdown = MemoryBreakdown(
        capacity=0, fill=0.9, limit=0, weights_gpu=0, weights_host=500_000, kv=0, compute=0, staging=0, spare=0
    )
    record = some_plan((placed(o.name) for o in of.operators), device="none", policy="cpu", memory=memory_breakdown)
    return replace(of, plan=record, reason="everything is on the CPU", times=())


def hostile() -> Served:
    """Names that try to be markup, scripts, terminal codes."""
    plain = weight(role="attn_q", k=256, n=256)
    operators = (
        replace(plain, name=f"blk.0.{HOSTILE}", layer=0, role=HOSTILE),
        replace(plain, name=HOSTILE, role=HOSTILE),
    )
    record = replace(
        served(1).plan, operators=tuple(placed(operator.name, gg=1.0) for operator in operators), policy=HOSTILE,
        device=HOSTILE, notes=(HOSTILE,), model_path=HOSTILE,
    )  # fmt: skip
    model = report_records.model(name=HOSTILE, arch=HOSTILE, path=HOSTILE, n_layer=1)
    times = (
        WorkTime(name=HOSTILE, token_s={"gpu": 1e-6}, prompt_s={}),
        WorkTime(name=f"layer {HOSTILE}", token_s={"cpu": 1e-6}, prompt_s={}),
    )
    return Served(model=model, operators=operators, plan=record, reason=HOSTILE, times=times)
