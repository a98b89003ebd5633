"""A described card, host and models for tests: rates that are easy to reckon with."""

from __future__ import annotations

from oallama.core.types import ModelInfo, Operator
from oallama.device.card import Card, Host

CARD = Card(
    name="card", description="a card", memory_bytes=8 * 2**30, bytes_per_s=500e9, flops_per_s=50e12,
    flops_float_per_s=25e12, kernel_s=2e-6, launch_s=5e-6, launch_node_s=1e-6, copy_s=4e-6, copy_issue_s=1e-6,
    synchronize_s=3e-6, pinned_bytes_per_s=20e9, pageable_bytes_per_s=8e9,
)  # fmt: skip
HOST = Host("host", bytes_per_s=40e9, flops_per_s=1e12, source="nobody", flops_float_per_s=0.5e12)

EMBD, HEADS, KV_HEADS, FF, VOCAB = 1024, 8, 2, 2048, 4096
BYTES = {"F32": 4.0, "F16": 2.0, "Q4_0": 18 / 32}


def model(n_layer: int = 4, n_expert: int = 0, n_expert_used: int = 0) -> ModelInfo:
    return ModelInfo("m.gguf", "llama", "m", n_layer, EMBD, FF, HEADS, KV_HEADS, EMBD // HEADS, EMBD // HEADS,
                     n_expert, n_expert_used, VOCAB, 4096, 1, "f" * 64)  # fmt: skip


def operators(of: ModelInfo, type_name: str = "Q4_0") -> list[Operator]:
    """Llama's mul-mats in graph order; with experts, Mixtral's."""
    n_kv = KV_HEADS * EMBD // HEADS
    made = []

    def add(layer: int | None, role: str, k: int, n: int, experts: int = 0, kind: str = type_name) -> None:
        name = f"{role}.weight" if layer is None else f"blk.{layer}.{role}.weight"
        n_bytes = int(k * n * max(1, experts) * BYTES[kind])
        used = of.n_expert_used if experts else 1
        op = "MUL_MAT_ID" if experts else "MUL_MAT"
        share = used / experts if experts else 1.0
        made.append(Operator(name, layer, role, op, kind, (k, n, max(1, experts)), n_bytes, share, used))

    for layer in range(of.n_layer):
        for role, n in (("attn_q", EMBD), ("attn_k", n_kv), ("attn_v", n_kv), ("attn_output", EMBD)):
            add(layer, role, EMBD, n)
        if of.n_expert:
            add(layer, "ffn_gate_inp", EMBD, of.n_expert, kind="F32")
        tail = "_exps" if of.n_expert else ""
        for role, k, n in (("ffn_gate", EMBD, FF), ("ffn_up", EMBD, FF), ("ffn_down", FF, EMBD)):
            add(layer, role + tail, k, n, of.n_expert)
    add(None, "output", EMBD, VOCAB)
    return made
