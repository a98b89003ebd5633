"""A thread that holds what must end with an engine, wherever a Ctrl-C comes, and whoever started it.

Linux kills a child when the thread that started it ends, so this thread starts them, and lives as long; and no Ctrl-C
arrives on it, so that what it has begun to release is released.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any, TypeVar

from ggml_bridge.threads import Thread

Entered = TypeVar("Entered")
_Wish = tuple[Callable[[], AbstractContextManager[Any]], "Future[Any]"]


class Keeper:
    """Enters contexts, and leaves them, the last first, when it is closed or nobody has it any more."""

    def __init__(self) -> None:
        """Raises MemoryError where the thread does not begin."""
        wishes: SimpleQueue[_Wish | object] = SimpleQueue()
        # put is C throughout: no Ctrl-C comes between, as it may where Python code is called for an object that goes
        gone = weakref.ref(self, wishes.put)
        thread = Thread(target=_keep, args=(wishes, gone), daemon=True)
        self._wishes, self._finalizer = wishes, weakref.finalize(self, _end, wishes, thread)
        self._thread = thread
        thread.start()

    def enter(self, make: Callable[[], AbstractContextManager[Entered]]) -> Entered:
        """Make a context and enter it, on the thread; returns what it gives, and raises what it raises."""
        future: Future[Entered] = Future()
        self._wishes.put((make, future))
        return future.result()

    def close(self) -> None:
        """Leave them all; may be called twice."""
        _end(self._wishes, self._thread)


def _end(wishes: SimpleQueue[_Wish | object], thread: Thread) -> None:
    wishes.put(None)
    if thread.is_alive() and thread is not threading.current_thread():  # a collector may run anywhere
        thread.join()


def _keep(wishes: SimpleQueue[_Wish | object], _gone: object) -> None:
    """Holds the weak reference too: it calls nobody once it has gone itself."""
    with ExitStack() as held:
        while isinstance(wish := wishes.get(), tuple):
            make, future = wish
            try:
                future.set_result(held.enter_context(make()))
            except BaseException as error:
                future.set_exception(error)
            del wish, make, future  # what they hold may be what has this keeper
