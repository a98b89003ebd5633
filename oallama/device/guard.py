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
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeVar

from oallama.core.errors import DeviceError, UsageError

T = TypeVar("T")

POLL_S = 0.2  # how often a waiting caller looks whether the device still lives
STALL_S = 300.0  # no beat for so long: the device is given up


class Runner(Protocol):
    """Where native calls of an engine run."""

    def call(self, function: Callable[[], T], cancel: Callable[[], None] = ...) -> T: ...

    def iterate(self, items: Callable[[], Generator[T, None, None]]) -> Generator[T, None, None]: ...

    def beat(self) -> None: ...

    def close(self, last: Callable[[], None]) -> bool: ...


class Direct:
    """Runs everything on the caller's own thread: for devices whose loss ggml reports, or cannot survive at all."""

    def call(self, function: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        return function()

    def iterate(self, items: Callable[[], Generator[T, None, None]]) -> Generator[T, None, None]:
        yield from items()

    def beat(self) -> None:
        pass

    def close(self, last: Callable[[], None]) -> bool:
        last()
        return True


class Guard:
    """Runs native calls on a thread that may be given up; one call at a time.

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
        _install_abort_callback()
        self.name = name
        self.lost = ""  # why the device was given up
        self._alive = alive
        self._on_lost = on_lost
        self._stall_s = stall_s
        self._last_beat = time.monotonic()
        self._abort_message = ""
        self._wake: Callable[[], None] = lambda: None  # of the call in flight
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = threading.Event()  # of the stream in flight
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"oallama-{name}", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Say that the call in flight makes progress."""
        self._last_beat = time.monotonic()

    def call(self, function: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        """function(), its result or its exception; DeviceError as soon as the device is lost.

        An interrupt (Ctrl-C) calls `cancel`, waits until the function has ended, and is then raised.
        """
        if threading.current_thread() is self._thread:
            return function()
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def job() -> None:
            try:
                results.put((function(), None))
            except BaseException as error:
                results.put((None, error))

        with self._in_flight(results):
            self._jobs.put(job)
            try:
                result, error = self._next(results)
            except KeyboardInterrupt:
                cancel()
                self._next(results)
                raise
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def iterate(self, items: Callable[[], Generator[T, None, None]]) -> Generator[T, None, None]:
        """What the generator yields, made on the guarded thread ahead of the reader; closing stops it at its next."""
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = self._stop = threading.Event()

        def job() -> None:
            error: BaseException | None = None
            try:
                with contextlib.closing(items()) as made:
                    for item in made:
                        results.put((item, None, False))
                        self.beat()
                        if stop.is_set():
                            break
            except BaseException as caught:
                error = caught
            results.put((None, error, True))

        with self._in_flight(results):
            self._jobs.put(job)
            finished = False
            try:
                while True:
                    item, error, finished = self._next(results)
                    if error is not None:
                        raise error
                    if finished:
                        return
                    yield item
            finally:
                stop.set()
                while not finished and not self.lost:
                    finished = self._next(results)[2]

    def close(self, last: Callable[[], None]) -> bool:
        """Stop what is in flight, call `last` on the guarded thread and end it; False if the device is lost, and
        `last` was not called or did not return."""
        if self.lost:
            return False
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop.set()
        self.beat()

        def job() -> None:
            try:
                last()
            finally:
                results.put(None)

        self._jobs.put(job)
        self._jobs.put(None)
        with self._told_of_aborts(results), contextlib.suppress(DeviceError):
            self._next(results)
        return not self.lost

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    @contextlib.contextmanager
    def _in_flight(self, results: queue.SimpleQueue[Any]) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError(f"the device {self.name} is still busy with another call; finish or close that one first")
        try:
            if not self.lost and not self._alive():
                self._give_up("it is gone", abort_to_come=False)  # nobody waits for its answer
            if self.lost:
                raise self._error()
            self.beat()
            with self._told_of_aborts(results):
                yield
        finally:
            self._busy.release()

    @contextlib.contextmanager
    def _told_of_aborts(self, results: queue.SimpleQueue[Any]) -> Iterator[None]:
        self._wake = lambda: results.put(_WAKE)
        with _guards_lock:
            _guards.append(self)
        try:
            yield
        finally:
            with _guards_lock:
                _guards.remove(self)

    def _next(self, results: queue.SimpleQueue[Any]) -> Any:
        while True:
            try:
                result = results.get(timeout=POLL_S)
            except queue.Empty:
                result = _WAKE
            if result is not _WAKE:
                return result
            if self._abort_message:
                self._give_up("the connection to it broke", abort_to_come=False)
            elif not self._alive():
                self._give_up("it ended or stopped answering")
            elif time.monotonic() - self._last_beat > self._stall_s:
                self._give_up(f"it has not answered for {self._stall_s:.0f} s")
            if self.lost:
                raise self._error()

    def _give_up(self, reason: str, abort_to_come: bool = True) -> None:
        self.lost = reason
        if abort_to_come:
            with _guards_lock:
                _abort_to_come.append(self)
        self._on_lost()

    def _error(self) -> DeviceError:
        return DeviceError(
            f"the device {self.name} was lost while working: {self.lost}; run again, or use --device none"
        )

    def _aborted(self, message: str) -> None:
        self._abort_message = message
        self._wake()


_WAKE = object()
_guards: list[Guard] = []  # with a call in flight
_abort_to_come: list[Guard] = []  # given up while ggml still waits: it will abort when the connection breaks at last
_guards_lock = threading.Lock()
_kept: list[Any] = []  # callbacks that ggml may call


def _install_abort_callback() -> None:
    """Make ggml park a thread whose RPC server is gone while a guarded call lasts; other aborts stay as they were.

    Installed again for every guard, in front of whatever took its place meanwhile.
    """
    from llama_cpp import llama_cpp as api

    signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    install = api._lib.ggml_set_abort_callback
    install.argtypes, install.restype = [signature], ctypes.c_void_p
    before: list[Any] = []

    def on_abort(message: bytes | None) -> None:
        text = (message or b"").decode("utf-8", "replace")
        if "ggml-rpc.cpp" in text and _tell_guards(text):
            threading.Event().wait()  # for good
        if before:
            before[0](message)
        else:
            print(text, file=sys.stderr, flush=True)

    with _guards_lock:
        callback = signature(on_abort)
        address = install(callback)
        if _kept and address == ctypes.cast(_kept[-1], ctypes.c_void_p).value:
            install(_kept[-1])
            return
        if address:
            before.append(signature(address))
        _kept.append(callback)


def _tell_guards(message: str) -> bool:
    """Tell the guard whose connection ggml gave up; False if no guard, and none given up before, can be meant.

    ggml does not say which connection broke. It is that of a guard with a call in flight whose device is dead; else
    one given up before, if ggml still owes us its abort; else it may be any with a call in flight.
    """
    with _guards_lock:
        waiting = list(_guards)
    dead = [guard for guard in waiting if not guard._alive()]
    with _guards_lock:
        awaited = [guard for guard in _abort_to_come if guard in dead or not dead]
        if awaited:
            _abort_to_come.remove(awaited[0])
            return True
    for guard in dead or waiting:
        guard._aborted(message)
    return bool(waiting)
