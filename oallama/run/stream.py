"""Answers as they come: an iterator over pieces of text, which has the record of the answer at its end."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Generator, Iterator

from oallama.core.errors import UsageError
from oallama.run.generate import Generation


class Stream(Iterator[str]):
    """Pieces of text, whole characters each. generation: the record of the answer once the last piece was read, else
    None. Raises UsageError where the engine is closed before the end."""

    def __init__(self, pieces: Generator[str, None, Generation]) -> None:
        self._pieces = pieces
        self._ended_by_engine = False
        self.generation: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.generation = self.generation or end.value
        if self._ended_by_engine:
            raise UsageError(CLOSED)
        raise StopIteration(self.generation)

    def rest(self) -> Generation:
        """Read to the end."""
        for _ in self:
            pass
        if self.generation is None:
            raise UsageError("this stream was closed before its end, so there is no record of its answer")
        return self.generation

    def close(self) -> None:
        """End the answer here; the engine may be used again."""
        self._pieces.close()

    def end_unread(self) -> None:
        """End it as the engine is closed, where its reader is away between two pieces."""
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_SUSPENDED:
            self._ended_by_engine = True
            self._pieces.close()


#
# one call at a time
#


CLOSED = "this engine is closed; make another one"


class Turns:
    """Turns of the threads that use an engine. A call holds the lock `next` in a `with` statement, and is `taken`
    inside it:

        with turns.next(), turns.taken():

    The lock is one of C, so that a Ctrl-C comes before it is held or behind, where `with` gives it back; in lines of
    Python it could come between the two, and the turn would be lost. A stream keeps its turn while its reader is away,
    so any thread may give a turn back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0  # that has the turn
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raises UsageError once closed."""
        if self._closed:
            raise UsageError(CLOSED)

    def next(self) -> threading.Lock:
        """The lock that a call waits for. Raises UsageError once closed, and where this very thread has the turn
        already, as in the middle of a stream."""
        self.check_open()
        if self._lock.locked() and self._thread == threading.get_ident():
            raise UsageError("this engine is still generating; finish or close that stream first")
        return self._lock

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The call of this thread begins, which holds the lock. Raises UsageError where it waited until the engine was
        closed."""
        self._thread = threading.get_ident()
        try:
            self.check_open()
            yield
        finally:
            self._thread = 0

    def close(self) -> None:
        """No turn any more. Raises UsageError where a call is under way."""
        if not self._lock.acquire(blocking=False):
            raise UsageError("another thread is still using this engine; close it when that call has ended")
        self._closed = True
        self._lock.release()
