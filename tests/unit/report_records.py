"""Synthetic affinity reports for the tests of report/: made of plain arithmetic, shaped like real models."""

from __future__ import annotations

from dataclasses import replace

from worlds import placed, some_plan

from oallama.core.affinity_report import Affinity, Baseline, MeasuredOn
from oallama.core.types import MemoryBreakdown, ModelInfo, Predicted, StreamSettings, Workload
from oallama.core.units import GIB, MIB
from oallama.report.operators import AffinityReport, PlanInUse

BITS = {"Q4_K": 4.5, "Q6_K": 6.5625, "F16": 16.0, "F32": 32.0}


def model(**changes: object) -> ModelInfo:
    base = ModelInfo(
        path="models/llama-8b-q4_k_m.gguf", arch="llama", name="Llama 8B", n_layer=32, n_embd=4096, n_ff=14336,
        n_head=32, n_head_kv=8, n_embd_head_k=128, n_embd_head_v=128, n_expert=0, n_expert_used=0, n_vocab=128256,
        n_ctx_train=8192, file_bytes=4_920_734_272, fingerprint="3f" * 32,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


DENSE = {
    "attn_q": (4096, 4096, 1), "attn_k": (4096, 1024, 1), "attn_v": (4096, 1024, 1), "attn_output": (4096, 4096, 1),
    "ffn_gate": (4096, 14336, 1), "ffn_up": (4096, 14336, 1), "ffn_down": (14336, 4096, 1),
}  # fmt: skip
SMALL = {
    "attn_q": (2048, 4096, 1), "attn_k": (2048, 512, 1), "attn_v": (2048, 512, 1), "attn_output": (4096, 2048, 1),
}  # fmt: skip
FIRST = {**SMALL, "ffn_gate": (2048, 6144, 1), "ffn_up": (2048, 6144, 1), "ffn_down": (6144, 2048, 1)}
EXPERTS = {
    **SMALL, "ffn_gate_inp": (2048, 128, 1), "ffn_gate_exps": (2048, 768, 128), "ffn_up_exps": (2048, 768, 128),
    "ffn_down_exps": (768, 2048, 128), "ffn_gate_shexp": (2048, 1408, 1), "ffn_up_shexp": (2048, 1408, 1),
    "ffn_down_shexp": (1408, 2048, 1),
}  # fmt: skip


def dense(n_layer: int = 32) -> AffinityReport:
    """An 8B-like model whose feed-forward half does not fit: GQA, some Q6_K down projections."""
    specs = [
        (f"blk.{layer}.{role}.weight", layer, role, "Q6_K" if role == "ffn_down" and layer % 4 == 0 else "Q4_K", shape)
        for layer in range(n_layer)
        for role, shape in DENSE.items()
    ]
    specs.append(("output.weight", None, "output", "Q6_K", (4096, 128256, 1)))
    return report(model(n_layer=n_layer), specs, capacity=4 * GIB)


def moe(n_layer: int = 48) -> AffinityReport:
    """A mixture of experts with a dense first layer and shared experts."""
    specs = [
        (f"blk.{layer}.{role}.weight", layer, role, "F32" if role == "ffn_gate_inp" else "Q4_K", shape)
        for layer in range(n_layer)
        for role, shape in (EXPERTS if layer else FIRST).items()
    ]
    specs.append(("output.weight", None, "output", "Q6_K", (2048, 151936, 1)))
    info = model(
        name="Qwen3 30B A3B Instruct", arch="qwen3moe", n_layer=n_layer, n_embd=2048, n_ff=768, n_expert=128,
        n_expert_used=8, file_bytes=18_556_686_912,
    )  # fmt: skip
    notes = ("The KV cache was lowered to 4096 tokens so that it fits.", "ffn_gate_inp stays with its block.")
    return with_plan(replace(report(info, specs, capacity=6 * GIB), converged=False, iterations=7), notes=notes)


HOSTILE = "<img src=x onerror=alerted=1><script>alert('x')</script>\"'&{{7*7}}\u202egpj.exe\x1b[31m\x00</style><!--"


def hostile() -> AffinityReport:
    """Names that try to be markup, templates, terminal codes and bidi tricks, and one that never ends."""
    specs = [
        (f"blk.0.{HOSTILE}", 0, HOSTILE, "Q4_K", (256, 256, 1)),
        ("blk.0." + "long_" * 60, 0, "long_" * 60, "Q4_K", (256, 256, 1)),
        (HOSTILE, None, HOSTILE, "F16", (256, 256, 1)),
    ]
    info = model(name=HOSTILE, arch=HOSTILE, path=HOSTILE, n_layer=1)
    return with_plan(replace(report(info, specs, capacity=64 * MIB), device=HOSTILE), notes=(HOSTILE,))


def with_plan(of: AffinityReport, **changes: object) -> AffinityReport:
    return replace(of, plan=replace(of.plan, **changes))  # type: ignore[arg-type]


def with_run(of: AffinityReport, measured: bool = False, seconds: float = 0.5) -> AffinityReport:
    """Beside a plan that divides the FFNs of the first three layers and leaves all else on the CPU."""
    places = tuple(
        placed(row.name, gg=0.25, cg=0.25)
        if row.role.startswith("ffn") and row.layer is not None and row.layer < 3
        else placed(row.name)
        for row in of.operators
    )
    predicted = Predicted(ttft_s=0.2, tpot_s=seconds / 100, total_s=seconds)
    plan = some_plan(
        places, policy="scheinfer", predicted=predicted, memory=of.plan.memory, token_assignment=((512, 400),),
        streaming=StreamSettings(2, "ahead"), notes=("told",),
    )  # fmt: skip
    return replace(of, run=PlanInUse(plan, measured))


def report(info: ModelInfo, specs: list[tuple], capacity: int) -> AffinityReport:
    """Rank by a benefit computed from the shape, fill nine tenths of `capacity`, and make the memory breakdown add
    up."""
    kv, compute, limit = capacity // 8, capacity // 16, capacity * 9 // 10
    rows = []
    for name, layer, role, kind, shape in specs:
        k, n, e = shape
        n_bytes = int(k * n * e * BITS[kind] / 8)
        active = 8 / e if e > 1 else 1.0
        t_cpu = n_bytes * active / 28e9 + 4e-6
        t_gpu = n_bytes * active / 700e9 + 6e-6
        t_transfer = 8e-6 - (layer or 0) * 3e-7 - (12e-6 if role.startswith("ffn") else 0)
        saved = t_cpu - t_gpu - t_transfer
        row = Affinity(
            name=name, layer=layer, role=role, type=kind, shape=shape, bytes=n_bytes, t_cpu_s=t_cpu, t_gpu_s=t_gpu,
            t_transfer_s=t_transfer, saved_s=saved, benefit_s_per_byte=saved / n_bytes, affinity=0.0, rank=0,
            placement=placed(name),
        )  # fmt: skip
        rows.append(row)
    rows.sort(key=lambda row: -row.benefit_s_per_byte)
    low, high = rows[-1].benefit_s_per_byte, rows[0].benefit_s_per_byte
    room, there = limit - kv - compute, []
    for rank, row in enumerate(rows, 1):
        fits = row.bytes <= room
        room -= row.bytes if fits else 0
        affinity = (row.benefit_s_per_byte - low) / (high - low) if high > low else 1.0
        there.append(replace(row, affinity=affinity, rank=rank, placement=placed(row.name, gg=float(fits))))
    on_device = sum(row.bytes for row in there if row.backend == "GPU")
    memory_breakdown = MemoryBreakdown(
        capacity=capacity, fill=0.9, limit=limit, weights_gpu=on_device,
        weights_host=sum(row.bytes for row in there) - on_device, kv=kv, compute=compute, staging=0, spare=room,
    )  # fmt: skip
    return AffinityReport(
        model=info,
        device="CUDA0",
        phase="decode",
        iterations=3,
        converged=True,
        operators=tuple(there),
        plan=some_plan(
            [row.placement for row in there],
            policy="oato",
            memory=memory_breakdown,
            predicted=Predicted(ttft_s=0.412, tpot_s=0.0318, total_s=4.45),
            workload=Workload(n_prompt=512, n_gen=128, n_ctx=4096),
        ),
        baselines=(
            Baseline("stock --fit", Predicted(ttft_s=0.5, tpot_s=0.04, total_s=5.34)),
            Baseline("all CPU", Predicted(ttft_s=9.1, tpot_s=0.000826, total_s=8.9)),
        ),
        measured=MeasuredOn(cpu="Example CPU 1000", device="Example GPU", at="2026-11-21T01:49:11Z"),
    )
