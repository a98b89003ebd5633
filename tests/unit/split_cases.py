"""Models and profiles for tests of split plans: a world in which every mul-mat takes alpha + bytes / rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.profile import LinearFit, Profile, ProfileCase
from oallama.core.types import ModelInfo, Operator
from oallama.place.placement import Candidate

TOKENS = (1, 32, 512)
EMBD, FF, VOCAB = 256, 1024, 3200


def model(n_layer: int) -> ModelInfo:
    return ModelInfo("m.gguf", "llama", "m", n_layer, EMBD, FF, 8, 2, 32, 32, 0, 0, VOCAB, 4096, 1, "f" * 64)


def operator(
    role: str,
    k: int,
    n: int,
    layer: int | None = 0,
    e: int = 1,
    used: int = 1,
    weight_type: str = "Q4_0",
    gate_up: bool = False,
    biased: bool = False,
) -> Operator:
    name = f"{role}.weight" if layer is None else f"blk.{layer}.{role}.weight"
    routed = role.endswith(("_exps", "_chexps"))
    n_bytes = GGML_TYPES_BY_NAME[weight_type].n_bytes(k * n * e)
    op = "MUL_MAT_ID" if routed else "MUL_MAT"
    return Operator(name, layer, role, op, weight_type, (k, n, e), n_bytes, used / e, used, gate_up, biased)  # type: ignore[arg-type]


def attention(layer: int, weight_type: str = "Q4_0") -> list[Operator]:
    shapes = (("attn_q", EMBD, EMBD), ("attn_v", EMBD, 64), ("attn_k", EMBD, 64), ("attn_output", EMBD, EMBD))
    return [operator(role, k, n, layer, weight_type=weight_type) for role, k, n in shapes]


def ffn(layer: int, weight_type: str = "Q4_0", n_ff: int = FF) -> list[Operator]:
    shapes = (("ffn_gate", EMBD, n_ff), ("ffn_up", EMBD, n_ff), ("ffn_down", n_ff, EMBD))
    return [operator(role, k, n, layer, weight_type=weight_type) for role, k, n in shapes]


def llama(n_layer: int, weight_type: str = "Q4_0") -> list[Operator]:
    layers = [op for i in range(n_layer) for op in (*attention(i, weight_type), *ffn(i, weight_type))]
    return [*layers, operator("output", EMBD, VOCAB, None, weight_type=weight_type)]


LINK = LinearFit(1e-5, 1e-9, 1.0)


@dataclass(frozen=True)
class World:
    """Seconds of everything. Rates are bytes of weights per second at one token."""

    cpu_rate: float = 1e9
    device_rate: float = 1e9
    alpha_s: float = 0.0  # of a mul-mat on the CPU
    device_alpha_s: float = 0.0
    token_s_per_byte: float = 0.0  # that each further token adds, on either side in the ratio of the rates
    launch_s: float = 1e-5
    link: LinearFit = LINK
    device: str = "RPC0"

    def seconds(self, on_device: bool, n_bytes: float, n_tokens: int) -> float:
        """Of a mul-mat with so many bytes of weights, whatever its shape."""
        rate, alpha_s = (self.device_rate, self.device_alpha_s) if on_device else (self.cpu_rate, self.alpha_s)
        per_token = self.token_s_per_byte * self.cpu_rate / rate
        return alpha_s + n_bytes * (1 / rate + (n_tokens - 1) * per_token)

    def profile(self, operators: Iterable[Operator], layouts: Sequence[str] = ("CPU",)) -> Profile:
        """Of these operators, each layout but the first half as fast as the one before it."""
        cases = []
        for op in operators:
            for n_tokens in TOKENS:
                host_s = self.seconds(False, op.bytes, n_tokens)
                sides = [("CPU", layout, host_s * 2**i) for i, layout in enumerate(layouts)]
                sides.append((self.device, "device", self.seconds(True, op.bytes, n_tokens)))
                for where, layout, s in sides:
                    cases.append(
                        ProfileCase(where, layout, op.mul_mat, n_tokens, 0, s, (s,)),
                    )
        link = dict.fromkeys(("h2d_pinned", "h2d_pageable", "d2h"), self.link)
        return Profile(1, {}, self.device, tuple(cases), (), link, None, self.launch_s, ())


def where(decision: Candidate, operators: Sequence[Operator]) -> dict[str, str]:
    """Of each operator: `device` where it lies there whole, `streamed` where some of it is copied there, else `cpu`."""
    slices = decision.placement
    return {
        op.name: "device" if there else "streamed" if slices.is_sliced and slices.cg[i] else "cpu"
        for i, (op, there) in enumerate(zip(operators, decision.placement.on_device, strict=True))
    }
