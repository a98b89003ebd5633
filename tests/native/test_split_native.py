"""The split backend with ggml's own scheduler and a strict asynchronous device: split_test.cpp, plain and sanitized.

Building takes a minute for each way the first time. Under the thread sanitizer ggml computes on one thread, because its
OpenMP runtime is not instrumented; two threads are tried without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_helpers import build_native, run_native
from seeds import FRESH

import ggml_bridge

pytestmark = pytest.mark.timeout(1200)  # building, and machines that are busy with something else

TESTS = [
    "device",
    "plan",
    "random",
    "graphs",
    "loading",
    "memory",
    "programs",
    "stream",
    "tokens",
    "times",
    "resident",
    "faults",
    "hot",
    "threads",
    "report",
]
# what has something new to show with other threads
THREADED = ["device", "faults", "threads"]
# blocks live on the device; what its memory does to ggml's own allocator is not ours to test
RESIDENT = ["times", "device", "graphs", "faults", "hot", "threads"]


def run_tests(program: Path, tests: list[str], threads: int = 1, options: str = "") -> None:
    command = [program, "--threads", str(threads), *options.split(), *tests]
    run_native(command, OMP_NUM_THREADS=str(threads))


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Runs of one thread, as many at a time as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


def run_all(pool: ThreadPoolExecutor, program: Path, runs: Sequence[tuple[list[str], str]]) -> None:
    """Runs of (tests, options); fails with the first that fails."""
    for run in [pool.submit(run_tests, program, tests, 1, options) for tests, options in runs]:
        run.result()


def test_every_test_is_run(bridge: ggml_bridge.Bridge) -> None:
    program = build_native("split_test", bridge.libraries.folder)
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, timeout=60)
    assert listed.stdout.split() == TESTS


@pytest.mark.parametrize("name", TESTS)
def test_split_backend(bridge: ggml_bridge.Bridge, name: str) -> None:
    run_tests(build_native("split_test", bridge.libraries.folder), [name])


@pytest.mark.thorough
def test_random_cuts_with_a_fresh_seed(bridge: ggml_bridge.Bridge) -> None:
    """The fixed seed is the program's own, in `random` above. What fails names its seed and case."""
    run_tests(build_native("split_test", bridge.libraries.folder), ["random"], options=f"--seed {FRESH}")


def test_split_backend_with_two_threads(bridge: ggml_bridge.Bridge) -> None:
    run_tests(build_native("split_test", bridge.libraries.folder), ["graphs", *THREADED], threads=2)


def test_split_backend_that_streams(bridge: ggml_bridge.Bridge, pool: ThreadPoolExecutor) -> None:
    program = build_native("split_test", bridge.libraries.folder)
    run_all(pool, program, [(["graphs", "times", *THREADED], "--streams"), (RESIDENT, "--resident --streams")])


@pytest.mark.thorough
def test_split_backend_where_blocks_live_on_the_device(bridge: ggml_bridge.Bridge) -> None:
    run_tests(build_native("split_test", bridge.libraries.folder), RESIDENT, options="--resident")


@pytest.mark.thorough
def test_split_backend_under_address_sanitizer(bridge: ggml_bridge.Bridge, pool: ThreadPoolExecutor) -> None:
    program = build_native("split_test", bridge.libraries.folder, "address,undefined")
    half, fewer = len(TESTS) // 2, f"--cases 100 --seed {FRESH}"
    streamed = ([*THREADED, "graphs"], "--streams")
    resident = (["graphs"], "--resident --streams")
    run_all(pool, program, [(TESTS[:half], fewer), streamed, resident, (TESTS[half:], fewer)])


@pytest.mark.thorough
def test_split_backend_under_thread_sanitizer(bridge: ggml_bridge.Bridge, pool: ThreadPoolExecutor) -> None:
    program = build_native("split_test", bridge.libraries.folder, "thread")
    run_all(pool, program, [(["graphs", *THREADED], ""), (THREADED, "--streams")])
