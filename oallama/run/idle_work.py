"""Background work of an engine while nobody uses it: a step at a time, so that a call waits for one at most."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ggml_bridge.threads import Thread
from oallama.core.errors import OallamaError
from oallama.device.guard import Runner
from oallama.run.turns import Turns

Step = Callable[[], None]


class IdleWork:
    """next_step: the next thing to do, found in the background while the engine may compute; None: there is nothing to
    do. The step itself is run where the engine computes, in a turn of its own; when a call has the turn, or waits for
    it, it is kept for later."""

    def __init__(self, next_step: Callable[[], Step | None], turns: Turns, runner: Runner) -> None:
        self._next_step, self._turns, self._runner = next_step, turns, runner
        self._kept: Step | None = None
        self._changed = threading.Lock()
        self._wanted = self._stops = False
        self._thread: Thread | None = None
        self.failure = ""
        """Why it has ended for good."""

    def begin(self) -> None:
        """Go on, as there may be something to do."""
        with self._changed:
            self._wanted = not self._stops and not self.failure
            if self._wanted and self._thread is None:
                self._thread = Thread(target=self._work, name="oallama-idle", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Returns when the step at hand is done; `begin` goes on."""
        with self._changed:
            self._stops, self._wanted, thread = True, False, self._thread
        if thread is not None and thread is not threading.current_thread():  # as where an engine is collected there
            thread.join()
        with self._changed:
            self._stops = False

    @property
    def is_busy(self) -> bool:
        """Whether steps are looked for, or done."""
        return self._thread is not None

    def drop(self) -> None:
        """A step that is kept for later is not to be done any more. For the one whose turn it is."""
        self._kept = None

    def _work(self) -> None:
        try:
            while self._goes_on():
                while self._one():
                    pass
        except OallamaError as error:
            self._fail(str(error))
        except BaseException as error:
            self._fail(repr(error))
            raise

    def _fail(self, why: str) -> None:
        with self._changed:
            self.failure, self._thread = why, None

    def _goes_on(self) -> bool:
        with self._changed:
            wanted, self._wanted = self._wanted, False
            if not wanted:
                self._thread = None
        return wanted

    def _one(self) -> bool:
        """Whether a step was done."""
        step = self._kept = self._kept or self._next_step()
        if step is None or self._stops:
            return False
        with self._turns.taken_free() as has_turn:
            if has_turn and self._kept is step:
                self._kept = None
                self._runner.call(step)
        return has_turn
