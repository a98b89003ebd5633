"""Handling of an abort of native code in a command: its last error, in one sentence. No exception can be made of
one."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Callable
from typing import Any

from oallama.device import rpc_abort
from oallama.device.load_params import load_bridge

SOURCE_FOLDER = re.compile(r"\S*/(?=[^/\s]+\.(?:c|cpp|h|hpp|cu):\d+)")
"""What stands before file:line of an assertion."""

_kept: list[Any] = []  # callbacks that native code may call


def exit_at_abort(say: Callable[[str], None]) -> None:
    """From now on an abort of native code in this process, ggml's or that of a C++ exception which nobody catches, is
    said in one sentence and ends the process with exit code 1. One that a guard waits for stays the guard's
    (rpc_abort.py), whether that was made before this or is made afterwards.

    Raises BridgeError.
    """
    from llama_cpp import llama_cpp as api

    load_bridge()  # which brings a callback of its own
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # that of a C++ exception is pages long

    def end(reason: str) -> None:
        try:
            say(f"llama.cpp ended with a fault of its own{reason}; use another file or other options")
        finally:
            os._exit(1)

    def on_ggml_abort(message: bytes | None) -> None:
        end(": " + SOURCE_FOLDER.sub("", (message or b"").decode("utf-8", "replace")))

    def on_signal(_number: int) -> None:
        end("")

    of_ggml, of_signal = ctypes.CFUNCTYPE(None, ctypes.c_char_p), ctypes.CFUNCTYPE(None, ctypes.c_int)
    _kept.extend([of_ggml(on_ggml_abort), of_signal(on_signal)])
    set_callback = api._lib["ggml_set_abort_callback"]
    set_callback.argtypes, set_callback.restype = [of_ggml], ctypes.c_void_p
    set_callback(_kept[-2])
    rpc_abort.install()
    set_handler = ctypes.CDLL(None)["signal"]  # Python's own would wait for the C code to return
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, of_signal], ctypes.c_void_p
    set_handler(signal.SIGABRT, _kept[-1])
