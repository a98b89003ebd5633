"""The self-test in a process that has other layouts than this CPU (tests/layouts.py)."""

from __future__ import annotations

from ggml_bridge.child import child_main
from ggml_bridge.selftest import _handle
from oallama.device.load_params import load_bridge

if __name__ == "__main__":
    child_main(_handle, load_bridge)
