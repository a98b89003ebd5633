"""Plans of the default model for stock llama.cpp's programs."""

from __future__ import annotations

from pathlib import Path

from oallama.core.types import MemoryLedger, OperatorPlacement, Workload
from oallama.cost.blocks import is_ffn
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
from oallama.plan.plan import Plan
from oallama.stores.default_model import FILE

MODEL = Path(__file__).resolve().parents[2] / "models" / FILE


def split_plan(path: Path, device: str, slices_only: bool = False) -> Plan:
    """Half of every FFN on the device and half in plain host memory; the attention of half of the layers on either side
    whole, the output on the device. slices_only: nothing but the halves of FFNs is there."""
    gguf = read_gguf(MODEL)
    model, ops = model_info(gguf), operators(gguf)
    placements = tuple(
        OperatorPlacement(name=op.name, gg=gg, cg=0.0, cc=1.0 - gg, layout="CPU" if gg == 0.5 else None)
        for op in ops
        for gg in [
            0.5 if is_ffn(op) else float(not slices_only and (op.layer is None or op.layer >= model.n_layer // 2))
        ]
    )
    ledger = MemoryLedger(
        capacity=2**30, fill=0.9, limit=2**29, weights_gpu=0, weights_host=0, kv=0, compute=0, staging=0, spare=0
    )
    plan = Plan(
        model_path=str(MODEL), model_fingerprint=model.fingerprint, machine_fingerprint="cd" * 32, device=device,
        policy="split", workload=Workload(n_prompt=32, n_gen=8, n_ctx=256), operators=placements,
        n_gpu_layers=0 if slices_only else 999, memory=ledger, predicted=None,
    )  # fmt: skip
    plan.check(model, ops)
    plan.save(path)
    return plan
