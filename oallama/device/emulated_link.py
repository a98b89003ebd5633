"""Emulated devices in this process: register them with ggml, measure how well they keep time, remove them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from oallama.core.errors import BridgeError, DeviceError, UsageError
from oallama.core.types import DeviceInfo
from oallama.core.units import format_bytes
from oallama.device.emulated import DEVICE_NAME, Emulated, all_parameters
from oallama.device.load_params import load_bridge
from oallama.device.rpc_link import device_info

EMULATED_BACKEND = "Emulated"  # registry name of libggml-emulated
MOST_LATE = 0.01  # of the time that passed: more, and what was measured is not a card's time


def open_emulated(specs: Sequence[Emulated]) -> tuple[list[DeviceInfo], Callable[[], None]]:
    """Register the devices; return the function that removes them. The specs must be resolved (profile/emulate.py).

    Raises UsageError for parameters that are wrong, a core that is not there, or more memory than this machine has
    for real values; DeviceError while other emulated devices are open in this process.
    """
    import ggml_bridge

    text = ",".join(map(str, specs))
    if any(spec.scale is None for spec in specs):
        raise UsageError(f"--device {text}: give scale=, which only a command or a Placer determines")
    try:
        device = load_bridge().emulated()
        device.register(all_parameters(specs))
    except ggml_bridge.Unsupported as error:
        raise DeviceError(f"--device {text}: {error}") from None
    except ggml_bridge.BridgeError as error:
        raise BridgeError(str(error)) from None
    except ValueError as error:
        raise UsageError(f"--device {text}: {error}") from None
    infos = [device_info(load_bridge().device(f"{DEVICE_NAME}{number}")) for number in range(len(specs))]

    def close() -> None:
        try:
            device.unregister()
        except ggml_bridge.BridgeError:
            return  # something of a model still lives on it: it stays registered, and idle

    try:
        for spec, info in zip(specs, infos, strict=True):
            check_room(spec, info.memory_total)
    except UsageError:
        close()
        raise
    return infos, close


def check_room(spec: Emulated, memory_bytes: int) -> None:
    """Raise UsageError if real values of so many bytes do not fit into this machine's memory."""
    import psutil

    available = int(psutil.virtual_memory().total)
    if spec.values != "drawn" and memory_bytes > available:
        raise UsageError(
            f"--device {spec}: real values of {format_bytes(memory_bytes)} do not fit into this machine's "
            f"{format_bytes(available)}; use a smaller vram=, or values=drawn, which computes nothing"
        )


@dataclass(frozen=True, slots=True)
class Punctuality:
    """Punctuality of an emulated device over some seconds."""

    elapsed_s: float
    stats: dict[str, Any]  # of EmulatedStats

    @property
    def late_share(self) -> float:
        """Overrun as a share of the time that passed."""
        return float(self.stats["late_s"]) / max(self.elapsed_s, 1e-9)

    @property
    def fault(self) -> str:
        """Return why the timings are not valid; "" if they are."""
        if self.stats["n_shared"]:
            return "another emulated device used the same core at the same time"
        if self.late_share > MOST_LATE:
            return f"the emulated device was late for {self.late_share:.1%} of the time: other programs used its core"
        return ""


TRIES = 3  # to measure something while nothing disturbs the device

T = TypeVar("T")


class Watch:
    """Watches how well this process's emulated device keeps time; does nothing for other devices."""

    def __init__(self, is_emulated: bool) -> None:
        self._device = load_bridge().emulated() if is_emulated else None
        self._start_s = 0.0

    def start(self) -> None:
        if self._device is not None:
            self._device.reset_stats()
            self._start_s = time.perf_counter()

    def stop(self) -> Punctuality | None:
        """Return the punctuality since start; the device's core is free afterwards. None for other devices."""
        if self._device is None:
            return None
        punctuality = Punctuality(time.perf_counter() - self._start_s, asdict(self._device.stats()))
        self._device.rest()
        return punctuality

    def measured(self, measure: Callable[[], T], most_s: float = math.inf) -> tuple[T, Punctuality | None]:
        """Measure; return the result and the device's punctuality, of the first punctual try, else of the last of
        TRIES. No try starts after most_s."""
        began_s = time.perf_counter()
        for tries_left in reversed(range(TRIES)):
            self.start()
            result = measure()
            kept = self.stop()
            if kept is None or not kept.fault or not tries_left or time.perf_counter() > began_s + most_s:
                break
        return result, kept
