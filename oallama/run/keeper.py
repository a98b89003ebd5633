"""A thread that starts an engine's child processes and releases them, also after a Ctrl-C.

Linux kills a child when the thread that started it ends, so this thread starts the children and outlives them. No
Ctrl-C arrives on this thread, so a release is never interrupted.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from ggml_bridge.threads import Thread
from oallama.device.interrupt import held_interrupt

NAME = "oallama-keeper"
POLL_S = 0.001

Entered = TypeVar("Entered")
_Answer = tuple[Any, BaseException | None]
_Wish = tuple[Callable[[], AbstractContextManager[Any]], "SimpleQueue[_Answer]"]


class Keeper:
    """Enters contexts, and leaves them in reverse order when it is closed or garbage-collected."""

    def __init__(self) -> None:
        """Raises MemoryError if the thread does not begin."""
        wishes: SimpleQueue[_Wish | object] = SimpleQueue()
        # put is implemented in C, so that no Ctrl-C interrupts it, as one may interrupt a finalizer in Python
        gone = weakref.ref(self, wishes.put)
        self._wishes, self._runs, self._is_closed = wishes, threading.Event(), False
        self._pid = os.getpid()
        weakref.finalize(self, _end, wishes, self._runs, self._pid)
        thread = Thread(target=_keep, args=(wishes, self._runs, gone), name=NAME, daemon=True)
        with held_interrupt():
            thread.start()

    def enter(self, make: Callable[[], AbstractContextManager[Entered]]) -> Entered:
        """Make a context and enter it, on the thread; returns what it gives, and raises what it raises."""
        if self._is_closed:
            raise RuntimeError("this keeper is closed")
        answers: SimpleQueue[_Answer] = SimpleQueue()
        self._wishes.put((make, answers))
        entered, error = answers.get()  # in C too: an interrupted Condition may raise something else
        if error is not None:
            raise error
        return cast("Entered", entered)

    def close(self) -> None:
        """Leave them all; may be called twice."""
        self._is_closed = True
        _end(self._wishes, self._runs, self._pid)


def _end(wishes: SimpleQueue[_Wish | object], runs: threading.Event, pid: int) -> None:
    """pid: of the process that owns the thread; a fork has no such thread."""
    wishes.put(None)
    on_it = threading.current_thread().name == NAME  # a collector may run anywhere
    while runs.is_set() and not on_it and os.getpid() == pid:
        time.sleep(POLL_S)  # an interrupt leaves a Condition, or a join, in an inconsistent state


def _keep(wishes: SimpleQueue[_Wish | object], runs: threading.Event, _gone: object) -> None:
    """_gone keeps the weak reference alive; else its callback never runs."""
    runs.set()
    try:
        with ExitStack() as held:
            while isinstance(wish := wishes.get(), tuple):
                make, answers = wish
                try:
                    answers.put((held.enter_context(make()), None))
                except BaseException as error:
                    answers.put((None, error))
                del wish, make, answers  # they may keep the owner of this keeper alive
    finally:
        runs.clear()
