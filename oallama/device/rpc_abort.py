"""What happens when ggml's RPC client aborts: its thread is parked where a guard waits for it (guard.py), and nothing
changes for any other abort."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oallama.device.interrupt import held_interrupt

if TYPE_CHECKING:
    from oallama.device.guard import Guard

SOURCE_FILE = "ggml-rpc.cpp"  # in the message of every abort of the client


_lock = threading.Lock()
_waiting: list[Guard] = []  # with a call in flight
_expected: list[Guard] = []  # given up while ggml still waits: it will abort when the connection breaks at last
_kept: list[Any] = []  # callbacks that ggml may call


@contextlib.contextmanager
def listening(waiter: Guard) -> Iterator[None]:
    """For as long as this lasts, an abort of the waiter's connection is told to it instead of ending the process."""
    with _lock:
        _waiting.append(waiter)
    try:
        yield
    finally:
        with _lock:
            _waiting.remove(waiter)


def expect(waiter: Guard) -> None:
    """The waiter gave its connection up, and ggml may not have yet: park ggml's thread when it follows."""
    with _lock:
        if not waiter.broke:
            _expected.append(waiter)


def install() -> None:
    """Put our callback in front of whatever is ggml's abort callback now; it stays the one for all other aborts."""
    from llama_cpp import llama_cpp as api

    signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    set_callback = api._lib["ggml_set_abort_callback"]
    set_callback.argtypes, set_callback.restype = [signature], ctypes.c_void_p
    before: list[Any] = []

    def on_abort(message: bytes | None) -> None:
        text = (message or b"").decode("utf-8", "replace")
        if SOURCE_FILE in text and _tell():
            threading.Event().wait()  # for good
        if before:
            before[0](message)
        else:
            print(text, file=sys.stderr, flush=True)

    with _lock, held_interrupt():  # ggml must never have a callback that is gone
        callback = signature(on_abort)
        address = set_callback(callback)
        if _kept and address == ctypes.cast(_kept[-1], ctypes.c_void_p).value:
            set_callback(_kept[-1])
            return
        if address:
            before.append(signature(address))
        _kept.append(callback)


def _tell() -> bool:
    """Tell the guard whose connection ggml gave up; False if no guard can be meant.

    ggml does not say which connection broke. It is that of a guard with a call in flight whose device is dead; else
    one given up before, if its abort is still to come; else it may be any with a call in flight.
    """
    with _lock:
        waiting = list(_waiting)
    dead = [waiter for waiter in waiting if not waiter.alive()]
    with _lock:
        expected = [waiter for waiter in _expected if waiter in dead or not dead]
        if expected:
            _expected.remove(expected[0])
            return True
        for waiter in dead or waiting:
            waiter.connection_broke()
    return bool(waiting)
