"""Work in the background: a step at a time, and whoever comes waits for one at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from oallama.core.errors import DeviceError
from oallama.device.guard import Direct
from oallama.run.idle_work import IdleWork
from oallama.run.turns import Turns

Step = Callable[[], None]


class Work:
    """Steps that are made as they are asked for."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self.turns = Turns()
        self.idle = IdleWork(lambda: next(steps, None), self.turns, Direct())

    def wait(self) -> None:
        assert _until(lambda: not self.idle.is_busy)


def test_all_steps_are_done_in_their_order_while_nobody_calls() -> None:
    done: list[int] = []
    work = Work(iter([lambda i=i: done.append(i) for i in range(50)]))  # type: ignore[misc]
    work.idle.begin()
    work.wait()
    assert done == list(range(50))
    work.idle.stop()


def test_a_call_waits_for_one_step_and_the_others_go_on_behind_it() -> None:
    in_step, wanted = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        in_step.set()
        assert wanted.wait(60)
        done.append(0)

    work = Work(iter([first, *(lambda i=i: done.append(i) for i in range(1, 9))]))  # type: ignore[misc]
    work.idle.begin()
    assert in_step.wait(60)
    turn = work.turns.next()
    wanted.set()
    with turn, work.turns.taken():  # waits for the first step, and comes before the second
        work.wait()
        assert done == [0]
    work.idle.begin()
    work.wait()
    assert done == list(range(9))


def test_a_step_that_found_no_turn_is_done_later_unless_it_is_dropped() -> None:
    for dropped in (False, True):
        done: list[str] = []
        work = Work(iter([lambda done=done: done.append("kept"), lambda done=done: done.append("next")]))  # type: ignore[misc]
        with work.turns.next(), work.turns.taken():
            work.idle.begin()
            work.wait()
            assert done == []
            work.idle.stop()
            if dropped:
                work.idle.drop()
        work.idle.begin()
        work.wait()
        assert done == (["next"] if dropped else ["kept", "next"])
        work.idle.stop()


def test_stop_waits_and_a_failure_ends_it_for_good() -> None:
    in_step = threading.Event()
    done: list[str] = []

    def slow() -> None:
        in_step.set()
        threading.Event().wait(0.05)
        done.append("slow")

    def lost() -> None:
        raise DeviceError("the device is gone")

    work = Work(iter([slow, lost, lambda: done.append("never")]))
    work.idle.begin()
    assert in_step.wait(60)
    work.idle.stop()
    assert done == ["slow"]
    work.idle.begin()
    assert _until(lambda: bool(work.idle.failure))
    assert "gone" in work.idle.failure
    work.idle.begin()
    work.idle.stop()
    assert done == ["slow"]


def _until(said: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if said():
            return True
        threading.Event().wait(0.01)
    return False
