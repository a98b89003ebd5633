"""A child process that does what it is told: the cases of test_child.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ggml_bridge.child import child_main
from ggml_bridge.errors import OutOfMemory


def handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    case = request["case"]
    print("noise on stdout")
    print("noise on stderr", file=sys.stderr, flush=True)
    if case == "echo":
        return {"echo": request["text"], "variable": os.environ.get("CHILD_CASE"), "pid": os.getpid(),
                "prepared": os.environ.get("CHILD_PREPARED")}  # fmt: skip
    if case == "progress":
        for step in range(request["steps"]):
            progress({"step": step, "of": request["steps"]})
        return {"steps": request["steps"]}
    if case == "abort":
        print("GGML_ASSERT(false) failed", file=sys.stderr, flush=True)
        os.abort()
    if case == "segv":
        ctypes.string_at(0)
    if case == "exit":
        os._exit(3)
    if case == "value error":
        raise ValueError("K must be positive")
    if case == "out of memory":
        raise OutOfMemory("not enough memory of type CUDA0")
    if case == "other error":
        raise KeyError("unforeseen")
    if case == "chatter":
        for _ in range(20000):
            print("x" * 99, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "loud":
        for _ in range(20000):
            print("x" * 99, file=sys.stderr)
        return {}
    if case == "hang":
        progress({"pid": os.getpid()})
        time.sleep(600)
    raise AssertionError(case)


def prepare() -> None:
    os.environ["CHILD_PREPARED"] = "yes"
    raise RuntimeError("a handler that needs it will say so")


if __name__ == "__main__":
    child_main(handle, prepare)
