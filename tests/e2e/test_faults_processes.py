"""Processes that are killed, stopped, crowded or moved: each command ends as documented and leaves no other behind."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time

import psutil
import pytest
from e2e.faults import COMMANDS, Place, Started
from seeds import ALL, SEED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children that end with their parent are Linux's")

STOPPED_S = 1.5


def until_it_has_children(started: Started) -> list[psutil.Process]:
    return started.until(started.children) or []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_child_is_one_sentence(name: str, place: Place) -> None:
    """Or no loss at all: what one child could not tell is asked of another."""
    seed = f"{name} {SEED}"
    print("seed:", seed)
    started = place.start(name)
    for child in until_it_has_children(started)[:1]:
        time.sleep(random.Random(seed).random() * 0.5)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    started.must_end(0, 1)
    place.must_hold_whole_files()


def test_children_and_workers_end_with_a_killed_parent(place: Place) -> None:
    for name in COMMANDS:  # one after the other: the first would be over before the last has children
        started = place.start(name)
        assert until_it_has_children(started), f"{name} starts no process"
        started.process.kill()
    for started in place.started:
        started.process.communicate()
        started.must_leave_nothing()


def test_commands_at_once_are_suspended_and_moved_to_one_cpu(place: Place) -> None:
    """Two of each, or one, in one cache and one folder; suspended with all that they started, as a laptop sleeps."""
    all_started = [*place.start_all(), *(place.start_all() if ALL else ())]
    for started in all_started:
        until_it_has_children(started)
    family = [process for started in all_started for process in started.family()]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(STOPPED_S)
    cpu = min(os.sched_getaffinity(0))
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {cpu})
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    for started in all_started:
        started.must_end(0)
    place.must_hold_whole_files()
