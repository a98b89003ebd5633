"""Memory of a device: its limit, the bytes left for operators, and their correction by no_alloc loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor

from oallama.core.errors import DoesNotFit
from oallama.core.types import MemoryBreakdown


def usable(capacity: int, fill: float, runtime: int) -> int:
    """Bytes that a placement may take: fill * capacity, or less if the rest of the capacity is smaller than
    `runtime`."""
    return max(0, min(int(fill * capacity), capacity - runtime))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device with norms and KV of all layers on it and every operator on the host, by a no_alloc load."""

    capacity: int  # --vram, or the free memory
    fill: float  # share of it that may be used (OATO Algorithm 1, line 16: 0.90)
    kv: int
    compute: int
    other_weights: int  # norms and biases
    n_layer: int
    operators_limit: int | None = None  # --gpu-weights as bytes
    runtime: int = 0  # runtime_bytes of llama.cpp's instance of the device's back end
    runtime_with_split: int = 0  # runtime_bytes of llama.cpp's and the split back end's instances

    @property
    def limit(self) -> int:
        return usable(self.capacity, self.fill, self.runtime)

    @property
    def with_split_instance(self) -> DeviceMemory:
        """The same with the split back end's instance besides llama.cpp's."""
        return replace(self, runtime=self.runtime_with_split)

    def of_layers(self, n_layer: int) -> DeviceMemory:
        """The same for a device with at most n_layer of the layers."""
        share = n_layer / max(1, self.n_layer)
        return replace(self, kv=int(share * self.kv), other_weights=int(share * self.other_weights), n_layer=n_layer)

    def budget(self, first_device_layer: int) -> int:
        """Bytes left beside norms and KV of the layers from first_device_layer on; negative: these do not fit.

        Assumes that layers have equal KV and other tensors. For models with different layers (sliding windows, hybrids)
        that costs another round of verification, not a wrong plan.
        """
        share = (self.n_layer - first_device_layer) / max(1, self.n_layer)
        return self.limit - self.compute - int(share * (self.kv + self.other_weights))

    def expected(self, first_device_layer: int, placed_bytes: int) -> int:
        """Bytes that a placement is expected to take, with the layers from first_device_layer on and placed_bytes of
        operators and slices on the device."""
        return self.limit - self.budget(first_device_layer) + placed_bytes

    def operator_budget(self, first_device_layer: int) -> int:
        """Bytes left for whole operators, which need norms and KV of their layer on the device."""
        if first_device_layer > self.n_layer:
            return 0
        return for_weights(self.budget(first_device_layer), self.operators_limit)


def for_weights(budget: int, limit: int | None, used: int = 0) -> int:
    """Bytes of the budget that weights may take. limit: cap on all weights on the device (--gpu-weights); used: weights
    that are placed already."""
    return budget if limit is None else min(budget, limit - used)


ENOUGH_USED = 0.99
"""A search ends with a placement that uses at least this share of the limit. On 5,000 drawn devices it then takes 2.3
loads on average; with 1.0 it takes 3.3 and uses 0.1 % more of the limit."""

SHRINK = 0.01
"""Share of the limit by which the budget shrinks further, doubled each time, if a smaller placement still does not fit:
weights moved to the host may need as much memory on the device again, to be offloaded. Without it no placement fits on
439 of those devices."""


class CorrectedMemory:
    """The device's memory, corrected by the memory that verified placements take. llama.cpp's compute buffers depend on
    the placement: on the host operators that it offloads, and on the side of the output. So a first placement may leave
    memory unused, or not fit; once both have occurred, the correction is bisected."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._first = memory
        self._extra = 0  # the correction: further bytes of compute buffers to expect
        self._fits: int | None = None  # the smallest correction with which a placement fitted
        self._fails: int | None = None  # the largest correction with which none fitted
        self._in_a_row = 0  # placements in a row that did not fit

    @property
    def memory(self) -> DeviceMemory:
        """The corrected memory to propose a placement for."""
        return replace(self._first, compute=self._first.compute + self._extra)

    def learn(self, first_device_layer: int, placed_bytes: int, real: MemoryBreakdown) -> bool:
        """Correct the memory by the breakdown of a placement proposed with it. Returns False if another proposal would
        not use the device better."""
        error = real.limit - real.spare - self._first.expected(first_device_layer, placed_bytes)
        if real.spare < 0:
            self._fails = self._extra if self._fails is None else max(self._fails, self._extra)
            self._in_a_row += 1
            correction = error + int(SHRINK * real.limit) * (2 ** (self._in_a_row - 1) - 1)
        else:
            self._fits = self._extra if self._fits is None else min(self._fits, self._extra)
            self._in_a_row = 0
            correction = error
            if real.limit - real.spare >= ENOUGH_USED * real.limit:
                return False
        if self._fits is not None:
            if self._fails is not None and not self._fails < correction < self._fits:
                correction = (self._fails + self._fits) // 2
            if correction >= self._fits:
                return False
        self._extra = correction
        return True


def memory_breakdown(
    capacity: int, fill: float, weights_gpu: int, weights_host: int, kv: int, compute: int, staging: int = 0,
    runtime: int = 0,
) -> MemoryBreakdown:  # fmt: skip
    """The memory breakdown of these bytes on the device; a negative `spare` means that they do not fit."""
    limit = usable(capacity, fill, runtime)
    spare = limit - weights_gpu - kv - compute - staging
    return MemoryBreakdown(capacity, fill, limit, weights_gpu, weights_host, kv, compute, staging, spare, runtime)


def summed(devices: tuple[MemoryBreakdown, ...], weights_host: int) -> MemoryBreakdown:
    """The memory breakdown of several devices."""
    names = ("capacity", "limit", "weights_gpu", "kv", "compute", "staging", "spare", "runtime")
    sums = {name: sum(getattr(device, name) for device in devices) for name in names}
    return MemoryBreakdown(fill=devices[0].fill, weights_host=weights_host, devices=devices, **sums)


def vram_beside(limit: int, fill: float, n_bytes: int, device: str, what: str, remedy: str) -> int:
    """The capacity to plan with so that n_bytes of the limit stay free. Raises DoesNotFit, naming `what` and the
    remedy, if no memory is left."""
    if n_bytes >= limit:
        raise DoesNotFit(n_bytes, limit, device, what, remedy)
    return floor((limit - n_bytes) / fill)
