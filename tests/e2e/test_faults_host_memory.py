"""Host memory that is refused, from before numpy and llama.cpp are loaded up to what is just enough: one sentence."""

from __future__ import annotations

import resource
import sys

import pytest
from e2e.faults import Place
from seeds import ALL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what RLIMIT_AS counts is Linux's")

TOO_LITTLE = (40, 100) if ALL else (100,)  # MiB of address space, in which numpy and llama.cpp cannot be loaded
# in which some of what a command does is refused, and in the last all of it is done
AT_THE_EDGE = (160, 185, 210, 235) if ALL else (185,)
LIBGOMP = "Thread creation failed"  # its own words, where there is no room for the stack of a thread
REASONS = ("out of memory", "out of host memory", "has no room", LIBGOMP)
GLIBC = "cannot allocate memory for thread-local data: ABORT"  # its dynamic linker ends the process, whatever it is


@pytest.mark.parametrize("mib", TOO_LITTLE)
def test_too_little_memory_to_begin_with_is_one_sentence(mib: int, place: Place) -> None:
    for started in place.start_all(before=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))):
        _, said = started.must_end(1)
        assert said == "oallama: out of memory; use a smaller model, a shorter context (-c) or a smaller batch (-ub)\n"
    place.must_hold_whole_files()


@pytest.mark.parametrize("mib", AT_THE_EDGE)
def test_memory_that_is_refused_at_any_time_is_one_sentence(mib: int, place: Place) -> None:
    for started in place.start_all(before=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))):
        code, said = started.must_end(0, 1, by_itself=GLIBC)
        assert not code or GLIBC in said or any(reason in said.splitlines()[-1] for reason in REASONS), (
            f"{started.name} in {mib} MiB: {said}"
        )
    place.must_hold_whole_files()
