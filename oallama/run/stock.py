"""Where options of stock llama.cpp place operators, and memory caps. Pure.

This is the placement that options *ask for*; what llama.cpp *did* is read back after a load (bench/verify.py).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from oallama.core.types import CPU_DEVICE, Operator, StockOptions
from oallama.device.load_params import LoadSettings
from oallama.model.validate import LLAMA_MAX_LAYERS
from oallama.plan.export import stock_flags
from oallama.planner.placement import Placement, n_gpu_layers


@dataclass(frozen=True, slots=True)
class Cap:
    """The memory cap of a load: device_bytes in total (--vram, --vram-fill), operator_bytes of operators' weights
    (--gpu-weights). None: no cap. of_each: device_bytes of each of several devices.
    """

    device_bytes: int | None = None
    operator_bytes: int | None = None
    of_each: tuple[int, ...] = ()

    def of_some(self, numbers: Sequence[int]) -> Cap:
        """The cap for some of several devices, by number; the same cap for one device."""
        each = tuple(self.of_each[number] for number in numbers) if self.of_each else ()
        return replace(self, device_bytes=sum(each), of_each=each if len(each) > 1 else ()) if each else self


@dataclass(frozen=True, slots=True)
class StockPlacement:
    """Options that place operators in stock llama.cpp. overrides: -ot as (regular expression, "CPU" or a device's
    name). device_layers: number of layers of each of several devices (-ts)."""

    n_gpu_layers: int
    overrides: tuple[tuple[str, str], ...] = ()
    options: StockOptions = StockOptions()  # noqa: RUF009 - frozen; patterns of its n_cpu_moe are the first overrides
    fit_target_mib: int = 0  # what --fit was told to leave free
    n_ubatch: int = 0  # -ub, and -b where that would be less; 0: the load's
    device_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, n_layer: int, placement: Placement, n_ubatch: int = 0) -> StockPlacement:
        """The options of a placement of planner/policies/stock.py: whole layers, without experts of the first ones."""
        options = placement.stock or StockOptions()
        overrides = expert_overrides(options.n_cpu_moe)
        return cls(n_gpu_layers(n_layer, placement), overrides, options, n_ubatch=n_ubatch)

    @property
    def flags(self) -> str:
        """The options as a command line; of overrides other than -ncmoe only their number."""
        n_others = len(self.overrides) - self.options.n_cpu_moe
        flags = stock_flags(self.n_gpu_layers, self.options, self.n_ubatch)
        flags += f" -ts {','.join(map(str, self.device_layers))}" if self.device_layers else ""
        return f"{flags} and {n_others} overrides" if n_others else flags

    @property
    def by_layers(self) -> StockPlacement:
        """The same with each layer on one device, as in plans: experts that --fit places on the next device stay on the
        host."""
        return replace(self, overrides=tuple((pattern, CPU_DEVICE) for pattern, _ in self.overrides))

    def load(self, settings: LoadSettings) -> LoadSettings:
        """The settings with these options."""
        patterns = tuple((pattern, None if where == CPU_DEVICE else where) for pattern, where in self.overrides)
        n_ubatch = self.n_ubatch or settings.n_ubatch
        return replace(
            settings, n_gpu_layers=self.n_gpu_layers, host_patterns=patterns, stock=self.options,
            n_ubatch=n_ubatch, n_batch=max(settings.n_batch, n_ubatch), device_layers=self.device_layers,
        )  # fmt: skip


EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of expert tensors, as llama.cpp's -ncmoe knows them."""


def expert_overrides(n_layers: int) -> tuple[tuple[str, str], ...]:
    """The overrides of -ncmoe: expert tensors of the first n_layers layers stay on the CPU. n_layers may exceed the
    model's, as many users mean all layers by a large number."""
    return tuple((rf"blk\.{layer}{EXPERTS}", "CPU") for layer in range(min(n_layers, LLAMA_MAX_LAYERS)))


def expected_on_device(operators: Sequence[Operator], n_layer: int, placement: StockPlacement) -> dict[str, bool]:
    """Operator -> whether -ngl and -ot place it on the device: the last layers (the output counts as one), except for
    overrides. n_gpu_layers below 0: all. Raises re.error for a bad pattern."""
    on_host = [re.compile(pattern) for pattern, where in placement.overrides if where == CPU_DEVICE]
    first = 0 if placement.n_gpu_layers < 0 else n_layer + 1 - placement.n_gpu_layers

    def is_on_device(operator: Operator) -> bool:
        return operator.layer_in(n_layer) >= first and not any(pattern.search(operator.name) for pattern in on_host)

    return {operator.name: is_on_device(operator) for operator in operators}


def effect_of(operators: Sequence[Operator], n_layer: int, placement: StockPlacement) -> Hashable:
    """A key that is equal for options with the same effect."""
    options, places = placement.options, expected_on_device(operators, n_layer, placement)
    return tuple(places.items()), placement.device_layers, options.no_host, options.moe_cache_bytes, placement.n_ubatch


def operator_bytes_on_device(operators: Sequence[Operator], n_layer: int, placement: StockPlacement) -> int:
    """Bytes of operators' weights that the options put on the device."""
    return bytes_at(operators, expected_on_device(operators, n_layer, placement))


def bytes_at(operators: Sequence[Operator], shares: Mapping[str, float]) -> int:
    """Bytes of operators' weights on the device. shares: operator -> share of its weight there."""
    return round(sum(operator.bytes * shares.get(operator.name, 0.0) for operator in operators))
