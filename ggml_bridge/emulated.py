"""The emulated device: a ggml device with a GPU's proportions whose timing is emulated (native/emulated/ggml-emulated.h
describes it). It is in ggml's registry between `register` and `unregister`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggml_bridge.ffi import Native, declared, encode, record

_ffi: Any = declared("emulated/ggml-emulated.h")


@dataclass(frozen=True, slots=True)
class EmulatedStats:
    """Counts of the device's work since the last reset, and how well it kept time. Seconds and bytes."""

    late_s: float = 0.0  # time in which at least one copy or graph was late
    n_overruns: int = 0  # whose real work took longer than their modelled time
    n_shared: int = 0  # times that another emulated device wanted the same core at the same time
    bytes_in: int = 0
    bytes_out: int = 0
    n_graphs: int = 0
    n_captured: int = 0  # of these: launched as CUDA launches a graph that it has captured
    device_bytes: int = 0  # held now
    pinned_bytes: int = 0
    n_allocations: int = 0  # of device or pinned memory, since it was registered


class EmulatedDevice:
    """The emulated device of this process. Get it from `Bridge.emulated`."""

    def __init__(self, path: Path) -> None:
        """Load libggml-emulated. Raises BridgeError, VersionMismatch."""
        self.path = path
        self._native = Native(path, _ffi, "emulated")

    def register(self, parameters: str) -> None:
        """Add the device to ggml's registry, or give it other parameters while nobody uses it.

        Raises ValueError naming the line of `parameters` that is wrong or a core that is not there, Unsupported while
        it is in use, VersionMismatch where the loaded ggml is another one.
        """
        self._native.call("emulated_register", encode(parameters))

    def unregister(self) -> None:
        """Take it out of ggml's registry. Raises Unsupported while it is in use."""
        self._native.call("emulated_unregister")

    def stats(self) -> EmulatedStats:
        """Return counts since the last reset."""
        return record(EmulatedStats, self._native.value("emulated_stats", "emulated_get_stats"))

    def reset_stats(self) -> None:
        self._native.call("emulated_reset_stats")

    def rest(self) -> None:
        """Let the device's thread sleep until the next call, so that its core is free."""
        self._native.call("emulated_rest")

    def mul_mat_seconds(self, type_number: int, K: int, N: int, E: int, n_expert_used: int, n_tokens: int) -> float:
        """Return the device's seconds for one mul-mat; n_expert_used 0: MUL_MAT over E matrices."""
        shape = (type_number, K, N, E, n_expert_used, n_tokens)
        return float(self._native.value("double", "emulated_mul_mat_seconds", *shape))
