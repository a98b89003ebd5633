"""Small placement problems for the tests: llama-like blocks with chosen times, and the exhaustive optimum."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.profile import LinearFit
from oallama.core.types import ModelInfo, Operator
from oallama.cost.graph import build_graph
from oallama.cost.passes import Pass
from oallama.cost.rates import NO_TRANSFER, TransferRates
from oallama.cost.whole import Costs, OperatorCost

ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
DECODE = (Pass(1, 256, 1),)


def model(n_layer: int, n_embd: int = 256) -> ModelInfo:
    return ModelInfo("m.gguf", "llama", "m", n_layer, n_embd, 512, 8, 2, 32, 32, 0, 0, 1000, 512, 1, "f" * 64)


def operators(n_layer: int, roles: Sequence[str] = ROLES, output: bool = True, n_bytes: int = 1000) -> list[Operator]:
    made = [
        Operator(f"blk.{i}.{role}.weight", i, role, "MUL_MAT", "F16", (256, 256, 1), n_bytes, 1.0)
        for i in range(n_layer)
        for role in roles
    ]
    if output:
        made.append(Operator("output.weight", None, "output", "MUL_MAT", "F16", (256, 1000, 1), n_bytes, 1.0))
    return made


def rates(alpha_s: float, beta_s_per_byte: float = 0.0, split_s: float = 0.0) -> TransferRates:
    fit = LinearFit(alpha_s, beta_s_per_byte, 1.0)
    return TransferRates(fit, fit, split_s)


def costs(
    ops: Sequence[Operator],
    n_layer: int,
    times: Sequence[tuple[float, float | None]],
    transfer: TransferRates = NO_TRANSFER,
    rest: tuple[float, float] = (0.0, 0.0),
) -> Costs:
    priced = tuple(OperatorCost(op.bytes, t_cpu, t_gpu, "CPU") for op, (t_cpu, t_gpu) in zip(ops, times, strict=True))
    return Costs(priced, build_graph(model(n_layer), ops), transfer, DECODE, *rest)
