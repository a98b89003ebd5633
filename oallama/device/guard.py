"""Calling into ggml so that a lost RPC server costs one call, not the process.

ggml's RPC client aborts the process when its server is gone, from a thread of its own that does the talking
(ggml-rpc.cpp, rpc_dispatcher::work); the thread that asked waits for an answer without a time-out. C offers no sound
way to unwind either thread: throwing or jumping out of them leaves ggml's locks and queues broken. But nothing obliges
ggml_abort()'s callback to return. So calls run on a thread that may be given up, the callback parks ggml's talking
thread for good, and the caller, who waits here, gets a DeviceError. What those two threads hold is never touched
again: the model's memory stays allocated until the process ends, and everything else goes on.

A server that neither answers nor dies (stopped, or cut off) is found by asking `alive`, and by time without a beat.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from ggml_bridge.threads import Thread
from oallama.core.errors import DeviceError, UsageError
from oallama.device import rpc_abort
from oallama.device.interrupt import HeldInterrupt, held_interrupt

T = TypeVar("T")

_WAKE = object()  # in a queue of results: look why

POLL_S = 0.2  # how often a waiting caller looks whether the device still lives
STALL_S = 300.0  # no beat for so long, not counting what this process is stopped: the device is given up


class Direct:
    """Runs native calls of an engine on the caller's own thread: for devices whose loss ggml reports, or cannot survive
    at all.

    call: an interrupt (Ctrl-C) calls `cancel`, waits until the function has ended or beats, and is then raised. beat:
    what runs there says that it makes progress, outside of native code. iterate: as call, for each item. close: False
    where the device is lost, and `last` did not end.
    """

    def __init__(self) -> None:
        self._held: HeldInterrupt | None = None  # of the call in flight

    def call(self, function: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        with held_interrupt(cancel) as self._held:
            return function()

    def iterate(self, items: Callable[[], Generator[T, None, None]]) -> Generator[T, None, None]:
        with contextlib.closing(items()) as made:
            while True:
                with held_interrupt() as self._held:
                    try:
                        item = next(made)
                    except StopIteration:
                        return
                yield item

    def beat(self) -> None:
        if self._held is not None:
            self._held.hand_on()

    def close(self, last: Callable[[], None]) -> bool:
        with held_interrupt():
            last()
        return True


class Guard:
    """As Direct, on a thread that may be given up; one call at a time.

    name: the device in messages. alive: asks whether the server still works; called while a call lasts.
    on_lost: called once when the device is given up. Methods raise DeviceError when it is lost.
    """

    def __init__(
        self,
        name: str,
        alive: Callable[[], bool],
        on_lost: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
    ) -> None:
        rpc_abort.install()
        self.name = name
        self.lost = ""  # why the device was given up
        self.alive = alive
        self._on_lost = on_lost
        self._stall_s = stall_s
        self._silent_s = 0.0  # since the last beat
        self.broke = False
        self._wake: Callable[[], None] = lambda: None  # of the call in flight
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = threading.Event()  # of the call in flight: nobody waits for it any more
        self._busy = threading.Lock()
        self._thread = Thread(target=self._work, name=f"oallama-{name}", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Say that the call in flight makes progress; ends it where its caller was interrupted."""
        self._silent_s = 0.0
        if threading.current_thread() is self._thread and self._stop.is_set():
            raise UsageError(f"the call on {self.name} was stopped; make it again")

    def call(self, function: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        """function(), its result or its exception; DeviceError as soon as the device is lost."""
        if threading.current_thread() is self._thread:
            return function()
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = threading.Event()

        def job() -> None:
            self._stop = stop
            try:
                results.put((function(), None))
            except BaseException as error:
                results.put((None, error))

        with self._in_flight(results), _waking(results) as held:
            self._jobs.put(job)
            try:
                result, error = self._next(results, held)
            except KeyboardInterrupt:
                stop.set()
                cancel()
                self._next(results, held)
                raise
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def iterate(self, items: Callable[[], Generator[T, None, None]]) -> Generator[T, None, None]:
        """What the generator yields, made on the guarded thread ahead of the reader; closing stops it at its next."""
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = threading.Event()

        def job() -> None:
            self._stop = stop
            error: BaseException | None = None
            try:
                with contextlib.closing(items()) as made:
                    for item in made:
                        results.put((item, None, False))
                        self.beat()
            except BaseException as caught:
                error = caught
            results.put((None, error, True))

        with self._in_flight(results):
            self._jobs.put(job)
            finished = False
            try:
                while True:
                    with _waking(results) as held:
                        item, error, finished = self._next(results, held)
                    if error is not None:
                        raise error
                    if finished:
                        return
                    yield item
            finally:
                stop.set()
                with contextlib.suppress(DeviceError):  # whoever calls next hears of it
                    while not finished and not self.lost:
                        finished = self._next(results)[2]

    def close(self, last: Callable[[], None]) -> bool:
        """Stop what is in flight, call `last` on the guarded thread and end it; False if the device is lost, and
        `last` was not called or did not return."""
        if self.lost:
            return False
        if threading.current_thread() is self._thread:  # the last reference to an engine was a job's
            self._jobs.put(None)
            last()
            return True
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def job() -> None:
            try:
                last()
            finally:
                results.put(None)

        with held_interrupt(), self._listening(results), contextlib.suppress(DeviceError):
            self._stop.set()
            self.beat()
            self._jobs.put(job)
            self._jobs.put(None)
            self._next(results)
        return not self.lost

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or what it is about would live until the next one comes

    @contextlib.contextmanager
    def _in_flight(self, results: queue.SimpleQueue[Any]) -> Iterator[None]:
        begun = False
        try:
            with held_interrupt():  # else the call might seem to last for ever
                begun = self._busy.acquire(blocking=False)
            if not begun:
                raise UsageError(
                    f"the device {self.name} is still busy with another call; finish or close that one first"
                )
            if not self.lost and not self.alive():
                self._give_up("it is gone", abort_to_come=False)  # nobody waits for its answer
            if self.lost:
                raise self._error()
            self.beat()
            with self._listening(results):
                yield
        finally:
            if begun:
                self._busy.release()

    @contextlib.contextmanager
    def _listening(self, results: queue.SimpleQueue[Any]) -> Iterator[None]:
        self._wake = lambda: results.put(_WAKE)
        with rpc_abort.listening(self):
            yield

    def _next(self, results: queue.SimpleQueue[Any], held: HeldInterrupt | None = None) -> Any:
        """The next result; an interrupt that is held is raised between two looks, never with a result in hand."""
        while True:
            ended = not self._thread.is_alive()  # before the look: what it put last counts
            try:
                result = results.get(timeout=POLL_S)
            except queue.Empty:
                self._silent_s += POLL_S
                result = _WAKE
            if result is not _WAKE:
                return result
            if held is not None:
                held.hand_on()
            if self.broke:
                self._give_up("the connection to it broke", abort_to_come=False)
            elif ended:
                self._give_up("its thread is out of host memory", abort_to_come=False)
            elif not self.alive():
                self._give_up("it ended or stopped answering")
            elif self._silent_s > self._stall_s:
                self._give_up(f"it has not answered for {self._stall_s:.0f} s")
            if self.lost:
                raise self._error()

    def _give_up(self, reason: str, abort_to_come: bool = True) -> None:
        self.lost = reason
        if abort_to_come:
            rpc_abort.expect(self)
        self._on_lost()

    def _error(self) -> DeviceError:
        return DeviceError(
            f"the device {self.name} was lost while working: {self.lost}; run again, or use --device none"
        )

    def connection_broke(self) -> None:
        """Called on ggml's thread, which is parked afterwards."""
        self.broke = True
        self._wake()


Runner = Direct | Guard


def _waking(results: queue.SimpleQueue[Any]) -> contextlib.AbstractContextManager[HeldInterrupt]:
    """Hold an interrupt and have whoever waits for results look at it."""
    return held_interrupt(lambda: results.put(_WAKE))
