"""A Ctrl-C that arrives while C code calls back into Python is handed on, not lost."""

from __future__ import annotations

import ctypes
import functools
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupts import interrupted_at, native_log_callback
from processes import until

from oallama.device.guard import Direct, Guard
from oallama.device.interrupt import held_interrupt
from oallama.device.native_log import native_log
from oallama.device.opening import OpenDevice
from oallama.device.spec import DeviceSpec
from oallama.placer import Placer
from oallama.run.load import LoadProgress
from oallama.run.setup import release

MODEL = Path(__file__).resolve().parents[2] / "models/oallama-stories-q4_0.gguf"


def test_a_ctrl_c_between_two_lines_of_the_log_is_raised_at_the_end() -> None:
    from llama_cpp import llama_cpp as api

    params = api.llama_model_default_params()
    # no Python runs when this arrives: as with a real one, the next function to be entered is the log's callback
    params.progress_callback = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, api.llama_progress_callback)
    reached = False
    with pytest.raises(KeyboardInterrupt), native_log() as log:
        model = api.llama_model_load_from_file(str(MODEL).encode(), params)
        if model:
            api.llama_model_free(model)
        reached = True
    assert reached and log.lines


@pytest.mark.parametrize("hold_interrupt", [True, False])
def test_a_ctrl_c_at_any_moment_gives_the_log_back(hold_interrupt: bool) -> None:
    """Else what is logged next would go to a callback that is gone, which ends the process."""
    moment, comes_so_far, before = 0, True, native_log_callback()

    def use() -> None:
        with native_log(hold_interrupt):
            time.monotonic()

    while comes_so_far:
        moment += 1
        comes_so_far = interrupted_at(moment, use)
        assert native_log_callback() == before, f"moment {moment}"
    assert moment > 10


def test_a_ctrl_c_in_the_progress_callback_stops_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    on_progress = LoadProgress._on_progress

    def interrupted(self: LoadProgress, share: float, user_data: object) -> bool:
        signal.raise_signal(signal.SIGINT)
        shares.append(share)
        return on_progress(self, share, user_data)

    monkeypatch.setattr(LoadProgress, "_on_progress", interrupted)
    placer = Placer.load(MODEL, device="none", threads=1)
    plan = placer.cpu_plan(placer.workload(8, 8))
    with pytest.raises(KeyboardInterrupt):
        placer.engine(plan)
    assert len(shares) == 1


def test_what_is_held_is_told_at_once_and_raised_at_the_end() -> None:
    told: list[str] = []
    reached = False
    with pytest.raises(KeyboardInterrupt), held_interrupt(lambda: told.append("outer")):
        with held_interrupt(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert told == ["inner", "inner"]
        assert told == ["inner", "inner", "outer"], "the outer one holds what the inner one hands on"
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_raised_although_the_stopped_call_failed() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, held_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the load was stopped")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_of_the_program_s_own_gets_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with held_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handler_alone() -> None:
    found: list[object] = []

    def work() -> None:
        with held_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard("a device", lambda: True)
    yield made
    made.close(lambda: None)


def sort_with_an_interrupt() -> None:
    """C calls back into Python, where a Ctrl-C arrives: an exception would be printed there and dropped."""
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    numbers = (ctypes.c_int * 2)(2, 1)
    arrived: list[None] = []

    def smaller(_a: int, _b: int) -> int:
        if not arrived:
            arrived.append(None)
            signal.raise_signal(signal.SIGINT)
        return -1

    ctypes.CDLL(None).qsort(numbers, ctypes.c_size_t(2), ctypes.c_size_t(4), compare(smaller))


def test_a_ctrl_c_in_a_call_on_the_caller_s_thread_is_raised_at_its_end() -> None:
    runner, ended = Direct(), []

    def call() -> None:
        sort_with_an_interrupt()
        ended.append(None)

    with pytest.raises(KeyboardInterrupt):
        runner.call(call)
    with pytest.raises(KeyboardInterrupt):
        runner.close(call)
    assert len(ended) == 2


def test_a_ctrl_c_between_two_items_is_raised_and_what_makes_them_is_closed() -> None:
    closed: list[None] = []

    def items() -> Iterator[int]:
        try:
            yield 1
            sort_with_an_interrupt()
            yield 2
        finally:
            closed.append(None)

    made: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for item in Direct().iterate(items):  # type: ignore[arg-type]
            made.append(item)
    assert (made, len(closed)) == ([1], 1)


def test_a_ctrl_c_ends_a_call_at_its_next_beat(guard: Guard) -> None:
    for runner in (Direct(), guard):
        n_beats = 0

        def work(runner: Any = runner) -> None:
            nonlocal n_beats
            for _ in range(1000):
                if n_beats == 2:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                n_beats += 1
                runner.beat()
                time.sleep(0.01)

        with pytest.raises(KeyboardInterrupt):
            runner.call(work)
        assert 3 <= n_beats < 900
        assert runner.call(lambda: 7) == 7, "the next call is not stopped"


def test_a_ctrl_c_that_arrives_with_the_result_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is taken, so that waiting for it again would be for ever."""

    class Results(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            result = super().get(block, timeout)
            if isinstance(result, tuple):
                signal.raise_signal(signal.SIGINT)
            return result

    alive = [True, True, True]
    guard = Guard("a device", lambda: bool(alive and alive.pop()))
    monkeypatch.setattr(queue, "SimpleQueue", Results)
    with pytest.raises(KeyboardInterrupt):
        guard.call(lambda: 7)
    assert not guard.lost
    monkeypatch.undo()
    guard.close(lambda: None)


def test_a_ctrl_c_as_a_call_begins_leaves_the_next_one_possible(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat goes on behind an answer that was stopped."""

    class Lock:
        def __init__(self) -> None:
            self.own = threading.Lock()
            self.release = self.own.release

        def acquire(self, blocking: bool) -> bool:
            taken = self.own.acquire(blocking)
            if n_left.pop():
                signal.raise_signal(signal.SIGINT)
            return taken

    n_left = [False, True]
    monkeypatch.setattr(guard, "_busy", Lock())
    with pytest.raises(KeyboardInterrupt):
        guard.call(lambda: 7)
    assert guard.call(lambda: 7) == 7


def test_a_ctrl_c_in_what_frees_an_engine_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_cpp import _internals

    free = _internals.LlamaBatch.__del__
    n_freed = 0

    def interrupted(self: Any) -> None:
        nonlocal n_freed
        n_freed += 1
        signal.raise_signal(signal.SIGINT)
        free(self)

    monkeypatch.setattr(_internals.LlamaBatch, "__del__", interrupted)
    placer = Placer.load(MODEL, device="none", threads=1)
    engine = placer.engine(placer.cpu_plan(placer.workload(8, 8)), progress=False)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert n_freed == 1
    engine.close()


class Order:
    """What an engine holds and its device, which note when they have been closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def close(self) -> None:
        time.sleep(0.005)
        self.closed.append("held")

    def abandon(self) -> None:
        self.closed.append("abandoned")

    def device(self) -> OpenDevice:
        return OpenDevice("a device", None, DeviceSpec("none"), close=lambda: self.closed.append("device"))


def test_a_ctrl_c_at_any_moment_of_closing_leaves_the_device_until_what_is_on_it_is_freed() -> None:
    """A worker that ends before takes this process with it: ggml aborts where it misses the server."""
    moment, comes_so_far, n_done = 0, True, 0
    while comes_so_far:
        moment += 1
        order, guard = Order(), Guard("a device", lambda: True)
        close = functools.partial(release, [order], guard, order.device())
        comes_so_far = interrupted_at(moment, close)
        n_done += order.closed != []
        if not order.closed:  # nothing had begun
            close()
        assert order.closed == ["held", "device"], moment
    assert n_done > moment / 2 > 10


def test_a_call_may_end_in_closing_its_own_engine() -> None:
    """As where the call had the last reference to it."""
    order, guard = Order(), Guard("a device of its own", lambda: True)
    guard.call(functools.partial(release, [order], guard, order.device()))
    assert order.closed == ["held", "device"]
    until(lambda: "oallama-a device of its own" not in [thread.name for thread in threading.enumerate()])
