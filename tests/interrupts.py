"""A Ctrl-C at any moment at which Python looks for one."""

from __future__ import annotations

import _thread
import ctypes
import dis
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from seeds import FRESH

MOMENTS = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN_VALUE", "YIELD_VALUE")
"""Before these instructions. Python looks for signals behind calls and jumps back, and where a function begins or goes
on; so one that comes at any other is seen where one is seen that comes at the next of these."""


class _Interrupt:
    """-_Interrupt() has SIGINT arrive without that Python looks for it at once, as it does behind a call."""

    __neg__ = functools.partial(_thread.interrupt_main)


def interrupted_at(moment: int, function: Callable[[], object]) -> bool:
    """Call it, and have a Ctrl-C arrive at the moment-th of its MOMENTS. Whether it came so far.

    It must be raised, or Python must have dropped it, as it does in callbacks of weak references (drop_no_interrupt has
    programs get it once more)."""
    left, interrupt = moment, _Interrupt()
    dropped: list[type[BaseException]] = []

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in moments(frame.f_code):
            left -= 1
            if left == 0:
                sys.settrace(None)
                _ = -interrupt  # type: ignore[operator]
                return None
        return trace

    before, hook_before = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: dropped.append(unraisable.exc_type)
    sys.settrace(trace)
    try:
        function()
        time.sleep(0)  # behind a call of Python it looks at the next of C
    except KeyboardInterrupt:
        assert left <= 0
    else:
        sys.settrace(before)
        assert left > 0 or dropped, f"it was lost at moment {moment}"
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook_before
    assert set(dropped) <= {KeyboardInterrupt}, f"{dropped} at moment {moment}"
    return left <= 0


def interrupted_often(function: Callable[[], object], step: int = 1) -> Iterator[int]:
    """Interrupt calls at every step-th moment, one call after the other, until a call ends before its moment comes."""
    moment, comes_so_far = FRESH % step, True
    while comes_so_far:
        moment += step
        comes_so_far = interrupted_at(moment, function)
        yield moment


@functools.cache
def moments(code: CodeType) -> frozenset[int]:
    """Offsets of MOMENTS in a function."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith(MOMENTS))


def native_log_callback() -> int | None:
    """Where llama.cpp's log goes: the address of a function."""
    import ggml_bridge

    api = ggml_bridge.load().libraries.llama_cpp.llama_cpp
    callback, data = api.llama_log_callback(), ctypes.c_void_p()
    api.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    return ctypes.cast(callback, ctypes.c_void_p).value
