"""Ctrl-C while C code calls back into Python.

Python raises KeyboardInterrupt in the next function that it enters, before its first line. In a callback from C, ctypes
prints the exception and drops it, and a `try` in the callback does not help; nor does it in `__del__`. So the signal is
only noted while native code runs, and raised afterwards, where Python is the caller. A program can have an interrupt
that was dropped elsewhere raised again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ggml_bridge.threads import Thread


@contextlib.contextmanager
def held_interrupt(on_interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Defer a Ctrl-C in the block: call on_interrupt, which must not raise, at once, and the previous handler, which
    usually raises KeyboardInterrupt, at the block's end.

    Does nothing outside the main thread, where signals do not arrive.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[FrameType | None] = []

    def hold(_number: int, frame: FrameType | None) -> None:
        arrived.append(frame)
        on_interrupt()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(signal.SIGINT, arrived[0])


AGAIN_S = 0.01  # after a Ctrl-C that was dropped, at the earliest


def drop_no_interrupt() -> None:
    """Raise a Ctrl-C again that Python dropped, as in `__del__` and in callbacks of weak references. For programs only:
    the hook is process-wide."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous_hook(unraisable)
            return
        Thread(target=_interrupt_behind, args=(hook,), daemon=True).start()

    sys.unraisablehook = hook


def _interrupt_behind(hook: Callable[[Any], None]) -> None:
    """Interrupt the main thread after it has left the hook, where the interrupt would be dropped too; by a signal,
    which also ends a wait."""
    time.sleep(AGAIN_S)
    while _is_in(hook):
        time.sleep(AGAIN_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_in(function: Callable[[Any], None]) -> bool:
    """Whether the main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
