"""Threads that begin or fail to: CPython's may do neither.

`threading.Thread.start` waits without end for a thread that is refused memory before it can say that it runs (CPython,
gh-140746). Nothing public tells of such a thread, so what start waits on, Thread's own event, is exchanged; where a
Python has none, `start` is as that Python has it.
"""

from __future__ import annotations

import threading
from typing import Any

BEGIN_S = 10.0  # in which a thread begins, not counting what this process is stopped
_WAIT_S = 0.1


class Thread(threading.Thread):
    """A threading.Thread whose `start` raises MemoryError if the thread does not begin."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._started = _Begun()


class _Begun(threading.Event):
    """Set by a thread that begins."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        for _ in range(round(BEGIN_S / _WAIT_S)):
            if super().wait(_WAIT_S):
                return True
        raise MemoryError("a thread did not start")
