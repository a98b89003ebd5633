"""A function that is called again and again while a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def ticking(seconds: float, tick: Callable[[], object]) -> Iterator[None]:
    """Call tick every so many seconds, in a thread, until the block ends; never where there is no memory for one."""
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
