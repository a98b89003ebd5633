"""Threads that are refused memory: as they begin, and while somebody waits for what they do."""

from __future__ import annotations

import queue
import threading

import pytest

from ggml_bridge import threads
from ggml_bridge.threads import Thread
from oallama.core.errors import DeviceError
from oallama.device.guard import Guard


class Refused(Thread):
    """As one whose memory was refused before its first line: CPython then prints, and ends it."""

    def _bootstrap(self) -> None:
        pass


def test_a_thread_that_does_not_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "BEGIN_S", 0.3)
    with pytest.raises(MemoryError, match="did not begin"):
        Refused(target=lambda: None).start()


def test_a_thread_that_begins_is_as_any() -> None:
    done = threading.Event()
    thread = Thread(target=done.set, name="of the test")
    thread.start()
    thread.join()
    assert done.is_set() and not thread.is_alive() and thread.name == "of the test"
    with pytest.raises(RuntimeError, match="only be started once"):
        thread.start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_for_a_guarded_call_hears_that_its_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[bool] = []
    guard = Guard("a device", lambda: True, lambda: lost.append(True))
    main = threading.get_ident()

    class Refusing(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            if threading.get_ident() != main:
                raise MemoryError
            super().put(item)

    monkeypatch.setattr(queue, "SimpleQueue", Refusing)
    with pytest.raises(DeviceError, match="a device was lost while working: its thread is out of host memory"):
        guard.call(lambda: 1)
    assert lost == [True]
    assert not guard.close(lambda: None)
