"""ggml_bridge: Python's way to ggml's devices, kernels and memory, beneath llama-cpp-python's own interface.

Importing this package is quick and loads nothing native; `load()` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggml_bridge.errors import BridgeError, ChildDied, ChildTimeout, OutOfMemory, Unsupported, VersionMismatch

if TYPE_CHECKING:
    from ggml_bridge.bridge import Bridge, Device, TypeInfo
    from ggml_bridge.emulated import EmulatedDevice, EmulatedStats
    from ggml_bridge.split import BlockTimes, SliceInfo, SplitBackend, SplitMemory, SplitPlan, SplitStats

__all__ = [
    "BlockTimes",
    "Bridge",
    "BridgeError",
    "ChildDied",
    "ChildTimeout",
    "Device",
    "EmulatedDevice",
    "EmulatedStats",
    "OutOfMemory",
    "SliceInfo",
    "SplitBackend",
    "SplitMemory",
    "SplitPlan",
    "SplitStats",
    "TypeInfo",
    "Unsupported",
    "VersionMismatch",
    "load",
]


def load() -> Bridge:
    """Return the bridge of this process: see `ggml_bridge.bridge.load`."""
    from ggml_bridge.bridge import load as load_bridge

    return load_bridge()


_LAZY = {
    **dict.fromkeys(("Bridge", "Device", "TypeInfo"), "bridge"),
    **dict.fromkeys(("EmulatedDevice", "EmulatedStats"), "emulated"),
    **dict.fromkeys(("BlockTimes", "SliceInfo", "SplitBackend", "SplitMemory", "SplitPlan", "SplitStats"), "split"),
}
"""Names by the module they are in, imported on first use: they need cffi."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"ggml_bridge.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'ggml_bridge' has no attribute '{name}'")
