"""What a device may hold, and what is left of it for operators."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import MemoryLedger


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on the device with all layers' norms and KV there and every operator on the host (a no_alloc load says
    them)."""

    capacity: int  # --vram, or what is free
    fill: float  # share of it that may be used (OATO Algorithm 1, line 16: 0.90)
    kv: int
    compute: int
    other_weights: int  # norms, biases: what is on the device and no operator
    n_layer: int
    operators_limit: int | None = None  # --gpu-weights as bytes

    @property
    def limit(self) -> int:
        return int(self.fill * self.capacity)

    def room(self, first_device_layer: int) -> int:
        """Bytes left when the layers from first_device_layer on are on the device; negative: does not fit.

        KV and the other tensors are taken as spread evenly over the layers; the plan is verified by a no_alloc load
        before it is used, so models that spread them otherwise (sliding windows, hybrids) cost another round, not a
        wrong plan.
        """
        share = (self.n_layer - first_device_layer) / max(1, self.n_layer)
        return self.limit - self.compute - int(share * (self.kv + self.other_weights))

    def operator_room(self, first_device_layer: int) -> int:
        """Bytes left for whole operators, which need their layer's norms and KV beside them."""
        if first_device_layer > self.n_layer:
            return 0
        room = self.room(first_device_layer)
        return room if self.operators_limit is None else min(room, self.operators_limit)


def ledger(
    capacity: int, fill: float, weights_gpu: int, weights_host: int, kv: int, compute: int, staging: int = 0
) -> MemoryLedger:
    """The ledger of what a load puts on the device; `spare` may be negative, which means that it does not fit."""
    limit = int(fill * capacity)
    spare = limit - weights_gpu - kv - compute - staging
    return MemoryLedger(capacity, fill, limit, weights_gpu, weights_host, kv, compute, staging, spare)
