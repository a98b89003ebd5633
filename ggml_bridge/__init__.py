"""ggml_bridge: Python's way to ggml's devices, kernels and memory, beneath llama-cpp-python's own interface.

Importing this package is quick and loads nothing native; `load()` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggml_bridge.errors import BridgeError, ChildDied, ChildTimeout, OutOfMemory, Unsupported, VersionMismatch

if TYPE_CHECKING:
    from ggml_bridge.bridge import Bridge as Bridge

__all__ = ["BridgeError", "ChildDied", "ChildTimeout", "OutOfMemory", "Unsupported", "VersionMismatch", "load"]


def load() -> Bridge:
    """Return the bridge of this process: see `ggml_bridge.bridge.load`."""
    from ggml_bridge.bridge import load as load_bridge  # needs cffi

    return load_bridge()
