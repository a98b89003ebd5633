"""What the tests of the emulated device do in a process of their own: python -m emulated_cases."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from typing import Any

import ggml_bridge
from ggml_bridge.child import child_main

NAME = "Emulated0"


def touch(parameters: str) -> dict[str, Any]:
    """Reads a byte of a device buffer."""
    bridge = ggml_bridge.load()
    bridge.emulated().register(parameters)
    buft = bridge.buft(NAME)
    library = bridge.libraries.llama_cpp.llama_cpp._lib
    library.ggml_backend_buft_alloc_buffer.restype = ctypes.c_void_p
    library.ggml_backend_buft_alloc_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.ggml_backend_buffer_get_base.restype = ctypes.c_void_p
    library.ggml_backend_buffer_get_base.argtypes = [ctypes.c_void_p]
    buffer = library.ggml_backend_buft_alloc_buffer(buft, 4096)
    return {"byte": ctypes.c_char.from_address(library.ggml_backend_buffer_get_base(buffer)).value.hex()}


def busy(parameters: str, seconds: float) -> int:
    """Uses the device for so long; how often another one wanted its core."""
    bridge = ggml_bridge.load()
    device = bridge.emulated()
    device.register(parameters)
    device.reset_stats()
    end = time.monotonic() + seconds
    with bridge.transfer(NAME, "h2d", True, 1 << 16) as timer:
        while time.monotonic() < end:
            timer.run(1)
    return device.stats().n_shared


def two(parameters: str) -> dict[str, Any]:
    other = subprocess.Popen([sys.executable, "-m", "emulated_cases", parameters], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()  # it is at work
    together = 0
    for _ in range(20):  # it may be kept from working for a while
        together = together or busy(parameters, 1.0)
    other.kill()
    other.wait()
    return {"together": together}


CASES = {"touch": touch, "two": two}

if __name__ == "__main__":
    if len(sys.argv) == 2:
        busy(sys.argv[1], 0.1)
        print("at work", flush=True)
        busy(sys.argv[1], 30.0)
    else:
        child_main(lambda request, progress: CASES[request["case"]](request["parameters"]))
