"""Threads that are refused memory as they begin."""

import threading

import pytest

from ggml_bridge import threads
from ggml_bridge.threads import Thread


class Refused(Thread):
    """As one whose memory was refused before its first line: CPython then prints, and ends it."""

    def _bootstrap(self):
        pass


def test_a_thread_that_does_not_begin_is_an_error(monkeypatch):
    monkeypatch.setattr(threads, "BEGIN_S", 0.3)
    with pytest.raises(MemoryError, match="did not begin"):
        Refused(target=lambda: None).start()


def test_a_thread_that_begins_is_as_any():
    done = threading.Event()
    thread = Thread(target=done.set, name="of the test")
    thread.start()
    thread.join()
    assert done.is_set() and not thread.is_alive() and thread.name == "of the test"
    with pytest.raises(RuntimeError, match="only be started once"):
        thread.start()
