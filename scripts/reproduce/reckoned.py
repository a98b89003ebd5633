"""Memory of a load on a described card, reckoned by sizes: no load is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oallama.core.profile import Profile
from oallama.core.types import ModelInfo, Operator, Workload
from oallama.core.units import MIB
from oallama.cost.offload import cache_bytes
from oallama.place.placed import Placed
from oallama.place.problem import LoadBytes

CONTEXT_BYTES = 300 * MIB  # of a CUDA context and its libraries
F32 = 4


@dataclass(frozen=True)
class Reckoned:
    """The probe of a Problem: weights, KV, and a compute buffer with logits of a micro-batch, its widest activations
    and the largest weight that llama.cpp may offload."""

    info: ModelInfo
    operators: Sequence[Operator]
    profile: Profile

    def __call__(self, load: Workload, placed: Placed) -> LoadBytes:
        info, operators = self.info, self.operators
        there = sum(op.bytes for op, there_is in zip(operators, placed.on_device, strict=True) if there_is)
        here = sum(op.bytes for op in operators) - there
        if placed.first_device_layer > info.n_layer:
            return LoadBytes(0, here, 0, 0, self.card_bytes())
        shape = next(case.shape for case in self.profile.rest if case.shape is not None)
        layers = info.n_layer - placed.first_device_layer
        kv = int(layers * load.n_ctx * cache_bytes(shape))
        wide = info.n_ff * max(1, info.n_expert_used) * 3 + 4 * info.n_embd
        compute = CONTEXT_BYTES + F32 * load.n_ubatch * (info.n_vocab + wide)
        compute += max(
            (op.bytes for op, there_is in zip(operators, placed.on_device, strict=True) if not there_is),
            default=0,
        )
        return LoadBytes(there, here, kv, compute, self.card_bytes())

    def card_bytes(self) -> int:
        return int(self.profile.fingerprint["device_memory_bytes"])
