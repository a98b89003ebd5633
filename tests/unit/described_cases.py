"""A described card, host and models for tests: rates that are easy to reckon with."""

from __future__ import annotations

from oallama.core.types import ModelInfo, Operator
from oallama.core.units import MIB
from oallama.cost.graph import build_graph
from oallama.device.card import Card, Host
from oallama.device.machines import machine_of
from oallama.place.attention import with_attention
from oallama.place.problem import LoadBytes, Problem
from oallama.place.pure_plan import probe_of
from oallama.profile.described import described

CARD = Card(
    name="card", description="a card", memory_bytes=8 * 2**30, bytes_per_s=500e9, flops_per_s=50e12,
    flops_float_per_s=25e12, kernel_s=2e-6, launch_s=5e-6, launch_node_s=1e-6, copy_s=4e-6, copy_issue_s=1e-6,
    synchronize_s=3e-6, pinned_bytes_per_s=20e9, pageable_bytes_per_s=8e9,
)  # fmt: skip
HOST = Host("host", bytes_per_s=40e9, flops_per_s=1e12, source="nobody", flops_float_per_s=0.5e12)

EMBD, HEADS, KV_HEADS, FF, VOCAB = 1024, 8, 2, 2048, 4096
TOKENS = (1, 8, 32, 128, 512)  # of described_problem
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


def described_problem(machine: str, share: float, n_expert: int = 0) -> Problem:
    """Of a small model, on a card that has room for a share of it."""
    of = model(n_expert=n_expert, n_expert_used=2 if n_expert else 0)
    ops = tuple(operators(of, "Q4_0"))
    weights = sum(op.bytes for op in ops)
    on = machine_of(machine)
    profile = with_attention(described(on.host, on.card, of, ops, TOKENS), "on")
    probe = probe_of(LoadBytes(0, weights, 4 * MIB, MIB, 0), ops, of.n_layer, int(share * weights) + 6 * MIB)
    return Problem(ops, build_graph(of, ops), profile, probe, None, 0.9, None, host_room=2**40)
