"""Placements as a server serves them, for tests: a device, the CPU alone, slices, hostile names."""

from __future__ import annotations

from dataclasses import replace

import report_records

from oallama.core.types import MemoryLedger, Operator, OperatorPlacement, Predicted, Workload
from oallama.place.placement import unmeasured_cpu_record
from oallama.plan.plan import Plan
from oallama.report.placement import Served, WorkTime

HOSTILE = report_records.HOSTILE
ROLES = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def served(n_layer: int = 3) -> Served:
    """Layer 0 on the CPU, layer 1 with a split FFN, the others and the output on the device."""
    operators = tuple(
        Operator(f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT", "Q4_0", (256, 256, 1), 36864, 1.0)
        for layer in range(n_layer)
        for role in ROLES
    )
    operators += (Operator("output.weight", None, "output", "MUL_MAT", "Q6_K", (256, 1024, 1), 215040, 1.0),)
    placements = tuple(OperatorPlacement(o.name, *_shares(o.layer, o.role)) for o in operators)
    times = tuple(
        WorkTime(o.name, "operator", {"gpu" if p.gg == 1 else "cpu": 20e-6}, {"gpu" if p.gg == 1 else "cpu": 1e-3})
        for o, p in zip(operators, placements, strict=True)
        if p.gg in (0, 1)
    )
    times += (WorkTime("layer 1: FFN", "slice", {"cpu": 30e-6, "gpu": 25e-6}, {"gpu": 2e-3}),)
    ledger = MemoryLedger(6_000_000, 0.9, 5_400_000, 300_000, 200_000, 512_000, 256_000, 0, 4_332_000)
    record = Plan(
        "m.gguf", "ab" * 32, "cd" * 32, "rpc://127.0.0.1:9", "split", Workload(64, 32, 512), placements, n_layer,
        ledger, Predicted(0.05, 0.0004, 0.07),
    )  # fmt: skip
    model = report_records.model(n_layer=n_layer, name="Small")
    return Served(model, operators, record, "this is the placement of policy split", times)


def _shares(layer: int | None, role: str) -> tuple[float, float, float]:
    if layer == 0:
        return 0.0, 0.0, 1.0
    return (0.5, 0.25, 0.25) if layer == 1 and role.startswith("ffn") else (1.0, 0.0, 0.0)


def on_cpu(of: Served) -> Served:
    """The same model without a device and without times."""
    record = unmeasured_cpu_record(of.model, of.operators, of.plan.workload, 500_000)
    return replace(of, plan=record, reason="everything is on the CPU", times=())


def hostile() -> Served:
    """Names that try to be markup, scripts, terminal codes."""
    operators = (
        Operator(f"blk.0.{HOSTILE}", 0, HOSTILE, "MUL_MAT", "Q4_0", (256, 256, 1), 36864, 1.0),
        Operator(HOSTILE, None, HOSTILE, "MUL_MAT", "Q4_0", (256, 256, 1), 36864, 1.0),
    )
    base = served(1)
    placements = tuple(OperatorPlacement(operator.name, 1.0, 0.0, 0.0) for operator in operators)
    record = replace(
        base.plan, operators=placements, policy=HOSTILE, device=HOSTILE, notes=(HOSTILE,), model_path=HOSTILE
    )
    model = report_records.model(name=HOSTILE, arch=HOSTILE, path=HOSTILE, n_layer=1)
    times = (WorkTime(HOSTILE, "operator", {"gpu": 1e-6}, {}), WorkTime(f"layer {HOSTILE}", "rest", {"cpu": 1e-6}, {}))
    return Served(model, operators, record, HOSTILE, times)
