"""ggml_bridge: Python's way to ggml's devices, kernels and memory, beneath llama-cpp-python's own interface.

Importing this package is quick and loads nothing native; `load()` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggml_bridge.errors import BridgeError, ChildDied, ChildTimeout, OutOfMemory, Unsupported, VersionMismatch

if TYPE_CHECKING:
    from ggml_bridge.bridge import Bridge
    from ggml_bridge.devices import Device, TypeInfo

__all__ = [
    "Bridge",
    "BridgeError",
    "ChildDied",
    "ChildTimeout",
    "Device",
    "OutOfMemory",
    "TypeInfo",
    "Unsupported",
    "VersionMismatch",
    "load",
]


def load() -> Bridge:
    """The bridge of this process: see `ggml_bridge.bridge.load`."""
    from ggml_bridge.bridge import load as load_bridge

    return load_bridge()


def __getattr__(name: str) -> Any:
    """Bridge, Device and TypeInfo, imported on first use: they need cffi."""
    if name == "Bridge":
        from ggml_bridge.bridge import Bridge

        return Bridge
    if name in ("Device", "TypeInfo"):
        from ggml_bridge import devices

        return getattr(devices, name)
    raise AttributeError(f"module 'ggml_bridge' has no attribute '{name}'")
