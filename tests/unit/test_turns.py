"""Turns on an engine: calls wait for each other, none begins once it is closed."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from oallama.core.errors import UsageError
from oallama.run.turns import Turns


def test_another_threads_call_waits_for_its_turn() -> None:
    turns, begun = Turns(), threading.Event()

    def other() -> str:
        begun.set()
        turns.give_back(turns.take())
        return "had its turn"

    turn = turns.take()
    with ThreadPoolExecutor(1) as threads:
        waiting: Future[str] = threads.submit(other)
        assert begun.wait(60)
        assert not waiting.done()
        turns.give_back(turn)
        assert waiting.result(60) == "had its turn"


def test_a_turn_may_be_given_back_by_another_thread_and_twice() -> None:
    turns = Turns()
    turn = turns.take()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(turns.give_back, turn).result(60)
    later = turns.take()
    turns.give_back(turn)  # is over
    with pytest.raises(UsageError, match="still generating"):
        turns.take()
    turns.give_back(later)
    turns.take()


def test_who_waits_while_it_is_closed_is_told() -> None:
    turns = Turns()
    turns.take()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(turns.take)
        with pytest.raises(UsageError, match="another thread"):
            turns.close(in_stream=False)
        turns.close(in_stream=True)
        with pytest.raises(UsageError, match="closed"):
            waiting.result(60)
    with pytest.raises(UsageError, match="closed"):
        turns.take()
    turns.close(in_stream=False)
