"""One call at a time on an engine: calls of other threads wait for their turn, and none begins once it is closed."""

from __future__ import annotations

import threading

from oallama.core.errors import UsageError

CLOSED = "this engine is closed; make another one"


class Turns:
    """Who may use an engine. A stream keeps its turn while its reader is away, so any thread may give a turn back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is re-entrant: a stream may be collected at any point
        self._turn: object | None = None
        self._thread = 0  # that took it
        self._n_waiting = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raises UsageError once closed."""
        if self._closed:
            raise UsageError(CLOSED)

    def take(self) -> object:
        """The turn, as soon as no other call has it. Raises UsageError once closed, and where this very thread has it
        already, as in the middle of a stream."""
        turn = object()
        with self._changed:
            self.check_open()
            if self._turn is not None and self._thread == threading.get_ident():
                raise UsageError("this engine is still generating; finish or close that stream first")
            self._n_waiting += 1
            try:
                self._changed.wait_for(lambda: self._closed or self._turn is None)
            finally:
                self._n_waiting -= 1
            self.check_open()
            self._turn, self._thread = turn, threading.get_ident()
        return turn

    def take_free(self) -> object | None:
        """The turn where no call has it, none waits for it and none is barred; else None."""
        with self._changed:
            if self._closed or self._turn is not None or self._n_waiting:
                return None
            self._turn, self._thread = object(), threading.get_ident()
            return self._turn

    def give_back(self, turn: object) -> None:
        """The call that took this turn has ended; a turn that was given back already is nobody's."""
        with self._changed:
            if self._turn is turn:
                self._turn = None
                self._changed.notify()

    def close(self, in_stream: bool) -> None:
        """No turn any more. in_stream: the turn is that of a stream, which has been closed. Raises UsageError where a
        call is under way."""
        with self._changed:
            if self._turn is not None and not in_stream:
                raise UsageError("another thread is still using this engine; close it when that call has ended")
            self._turn, self._closed = None, True
            self._changed.notify_all()
