"""Collects llama.cpp's log of a load, to report a failure in one sentence."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from oallama.device.interrupt import held_interrupt

LEVEL_INFO, LEVEL_WARN, LEVEL_ERROR, LEVEL_CONTINUE = 2, 3, 4, 5  # enum ggml_log_level; 1 is debug

_PREFIX = re.compile(r"^\w+: (?:error loading model: )?(?:\w+: )?")  # names of functions

_lock = threading.RLock()  # the callback is one for the process


class NativeLog:
    """The last lines of the log, with their levels."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, str]] = deque(maxlen=4000)

    def add(self, level: int, text: str) -> None:
        """Append a message of the log callback; a continuation is added to the line before it."""
        if level == LEVEL_CONTINUE and self.lines:
            last_level, start = self.lines.pop()
            self.lines.append((last_level, start + text))
        else:
            self.lines.append((level, text))

    def texts(self, least_level: int = LEVEL_INFO) -> list[str]:
        """Return the lines of that level and above."""
        return [text.strip() for level, text in self.lines if level >= least_level]

    def reason(self) -> str:
        """Return the first error without llama.cpp's function names before it; "" without an error."""
        errors = self.texts(LEVEL_ERROR)
        return _PREFIX.sub("", errors[0]).split("\n")[0] if errors else ""


@contextlib.contextmanager
def native_log(hold_interrupt: bool = True) -> Iterator[NativeLog]:
    """Collect llama.cpp's log in the block instead of printing it.

    A Ctrl-C is raised at the block's end, as it would be lost in the log's callback. hold_interrupt False: llama.cpp is
    called on another thread, or the caller holds the interrupt.
    """
    from llama_cpp import llama_cpp as api

    log = NativeLog()

    def collect(level: int, text: bytes | None, user_data: Any) -> None:
        try:
            log.add(level, (text or b"").decode("utf-8", "replace"))
        except Exception:  # an exception cannot cross the C caller; a line of the log may be lost
            return

    callback = api.llama_log_callback(collect)
    with _lock, held_interrupt() if hold_interrupt else contextlib.nullcontext():
        callback_before, before_data = api.llama_log_callback(), ctypes.c_void_p()
        api.llama_log_get(ctypes.byref(callback_before), ctypes.byref(before_data))
        try:  # a Ctrl-C behind the next line would else leave a callback there that is gone
            api.llama_log_set(callback, ctypes.c_void_p(0))
            yield log
        finally:
            api.llama_log_set(callback_before, before_data)
