"""Turns on an engine: calls wait for each other, none begins once it is closed."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from oallama.core.errors import UsageError
from oallama.run.stream import Turns


def stream(turns: Turns) -> Generator[None, None, None]:
    with turns.next(), turns.taken():
        yield


def call(turns: Turns) -> str:
    with turns.next(), turns.taken():
        return "had its turn"


def test_another_threads_call_waits_for_its_turn() -> None:
    turns, begun = Turns(), threading.Event()

    def other() -> str:
        begun.set()
        return call(turns)

    with ThreadPoolExecutor(1) as threads:
        with turns.next(), turns.taken():
            waiting: Future[str] = threads.submit(other)
            assert begun.wait(60)
            assert not waiting.done()
        assert waiting.result(60) == "had its turn"


def test_a_turn_may_be_given_back_by_another_thread() -> None:
    turns = Turns()
    read = stream(turns)
    next(read)
    with pytest.raises(UsageError, match="still generating"):
        turns.next()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(read.close).result(60)
    assert call(turns) == "had its turn"


def test_none_begins_once_it_is_closed() -> None:
    turns, waits = Turns(), threading.Event()
    read = stream(turns)
    next(read)

    def waiting() -> str:
        lock = turns.next()
        waits.set()
        with lock, turns.taken():
            return "had its turn"

    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(waiting)
        assert waits.wait(60)
        with pytest.raises(UsageError, match="another thread"):
            turns.close()
        read.close()
        assert waiter.result(60) == "had its turn"
    late = turns.next()
    turns.close()
    with pytest.raises(UsageError, match="closed"), late, turns.taken():
        pass
    with pytest.raises(UsageError, match="closed"):
        turns.next()
    turns.close()
