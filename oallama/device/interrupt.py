"""Ctrl-C while C code calls back into Python.

Python raises KeyboardInterrupt in whatever function it enters next, before the first line of it. Where that is a
callback, C is the caller: ctypes prints the exception and drops it, and no `try` in the callback can help.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def held_interrupt(on_interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A Ctrl-C that arrives in the block calls on_interrupt, which must not raise, and is handed on at the block's end
    to whoever handled it before: as a rule it is raised there.

    Does nothing on another thread than the main one, where signals do not arrive.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
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
        signal.signal(signal.SIGINT, before)
        if arrived:
            before(signal.SIGINT, arrived[0])
