"""Calls a function periodically while a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ticking(seconds: float, tick: Callable[[], object]) -> Iterator[None]:
    """Call tick periodically in a thread until the block ends; not at all if no thread can be started."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            tick()

    thread = threading.Thread(target=run, name="ticking", daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        yield
        return
    try:
        yield
    finally:
        over.set()
        thread.join()
