"""Ends the process with one sentence if native code aborts or hangs, which cannot become an exception."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from typing import Any, NoReturn

from ggml_bridge.threads import Thread
from oallama.core.errors import GGML_OUT_OF_MEMORY, OUT_OF_MEMORY
from oallama.device.load_params import load_bridge

SOURCE_FOLDER = re.compile(r"\S*/(?=[^/\s]+\.(?:c|cpp|h|hpp|cu|cuh):\d+)")
"""The folder in front of the file:line of an assertion."""

RPC_SILENCE_S = 60.0
"""Seconds without an answer, or without accepting data, after which an RPC server counts as lost."""

LOST = "the device was lost"
"""Beginning of the sentence about a lost device."""

_RPC_CLIENT = "ggml-rpc.cpp"
_GPU_BACK_END = re.compile(r"ggml-(?:cuda|hip|musa|vulkan|sycl|metal|opencl)")

_kept: list[Any] = []  # callbacks that native code may call


def end_process(sentence: str) -> NoReturn:
    """Write the sentence to stderr and exit with code 1. Any thread may call it."""
    try:
        os.write(2, f"oallama: {sentence}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)


def exit_at_abort() -> None:
    """Make an abort of native code end this process with one sentence and exit code 1: an abort of ggml, such as its
    RPC client's when the server is lost, or an uncaught C++ exception. Raises BridgeError."""
    if _kept:
        return
    api = load_bridge().libraries.llama_cpp.llama_cpp  # the bridge sets a callback of its own
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # the traceback of a C++ exception is pages long
    of_ggml, of_signal = ctypes.CFUNCTYPE(None, ctypes.c_char_p), ctypes.CFUNCTYPE(None, ctypes.c_int)
    on_abort = of_ggml(lambda message: end_process(sentence_of((message or b"").decode("utf-8", "replace"))))
    on_signal = of_signal(lambda _number: end_process(sentence_of("")))
    _kept.extend([on_abort, on_signal])
    set_callback = api._lib["ggml_set_abort_callback"]
    set_callback.argtypes, set_callback.restype = [of_ggml], ctypes.c_void_p
    set_callback(on_abort)
    set_handler = ctypes.CDLL(None)["signal"]  # Python's own would wait for the C code to return
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, of_signal], ctypes.c_void_p
    set_handler(signal.SIGABRT, on_signal)


def sentence_of(message: str) -> str:
    """Return the sentence for ggml's message at an abort; "" for an abort without a message."""
    if GGML_OUT_OF_MEMORY in message:
        return OUT_OF_MEMORY
    if _RPC_CLIENT in message:
        return (
            f"{LOST}: its RPC server ended, or did not answer for {RPC_SILENCE_S:.0f} s; "
            "run again when it answers, or use --device none"
        )
    reason = SOURCE_FOLDER.sub("", message)
    if _GPU_BACK_END.search(message):
        return f"{LOST} or failed: {reason}; run again, or use --device none"
    return f"llama.cpp failed{': ' * bool(reason)}{reason}; use another file or other options"


WATCH_S = 0.5


class Watchdog:
    """Ends this process with one sentence if a `with` block makes no progress for stall_s. Time in which the process is
    stopped does not count. device: its name in the sentence."""

    def __init__(self, device: str, stall_s: float) -> None:
        self._device = device
        self._stall_s = stall_s
        self._silent_s = 0.0  # since the last beat
        self._over = threading.Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def beat(self) -> None:
        """Note progress."""
        self._silent_s = 0.0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            self._silent_s += WATCH_S
            if self._silent_s > self._stall_s:
                end_process(f"{LOST}: {self._device} did not answer for {self._stall_s:.0f} s")
