"""A disk that is full, a cache that cannot be used, a clock that goes back, streams that are closed: one sentence."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
from e2e.faults import Place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a system refuses, and how, is Linux's here")

WRITES = {"plan": "File too large", "bench": "File too large", "serve": "no temporary folder can be written to"}
"""Commands that write a file, `plan` and `bench` where they are told to, and what they say where that cannot be."""


def test_a_full_disk_loses_results_only_where_they_were_to_be_written(place: Place) -> None:
    """No file may grow beyond nothing: EFBIG in place of ENOSPC, which only a file system of its own could say."""
    for started in place.start_all(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))):
        code, said = started.must_end(*((1,) if started.name in WRITES else (0,)))
        assert not code or WRITES[started.name] in said.splitlines()[-1], said
    place.must_hold_whole_files()


def test_a_cache_that_cannot_be_written_costs_at_most_a_note(place: Place) -> None:
    for started in place.start_all(cache=Path("/proc/no-such-folder"), leave_out=("plan", "bench")):
        started.must_end(0)


@pytest.mark.thorough
def test_a_half_written_cache_and_one_from_the_future_are_measured_again(place: Place) -> None:
    for started in place.start_all():
        started.must_end(0)
    kept = sorted(path for path in place.cache.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(kept) > 1
    for path in kept[::2]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for path in kept:
        os.utime(path, (4e9, 4e9))  # the clock was set back by a century since
    for started in place.start_all():
        started.must_end(0)
    place.must_hold_whole_files()


def test_closed_streams_are_one_sentence_where_a_result_was_to_be_printed(place: Place) -> None:
    """A chat that is asked nothing has none."""
    for started in place.start_all(shell="<&- >&-"):
        code, said = started.must_end(*((0, 1) if started.name in WRITES else (0,) if started.name == "chat" else (1,)))
        assert not code or "cannot write the result to stdout: it is closed" in said, said


def test_without_stderr_a_command_does_its_work(place: Place) -> None:
    for started in place.start_all(shell="2>&-", leave_out=("plan", "bench", "tune")):
        started.end()
        started.process.communicate(timeout=150)
        assert started.code == 0, started.name
        started.must_leave_nothing()
