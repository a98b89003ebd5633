"""The split backend with ggml's own scheduler and a strict asynchronous device: split_test.cpp, plain and sanitized.

Building takes a minute for each way the first time. Under the thread sanitizer ggml computes on one thread, because its
OpenMP runtime is not instrumented; two threads are tried without it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_helpers import build_native

import ggml_bridge

pytestmark = pytest.mark.timeout(1200)  # building, and machines that are busy with something else

TESTS = [
    "device",
    "plan",
    "types-dense",
    "types-moe",
    "types-lone",
    "graphs",
    "partial",
    "loading",
    "programs",
    "tokens",
    "trace",
    "faults",
    "threads",
    "leaks",
]
# what has something new to show with other threads
THREADED = ["device", "partial", "trace", "faults", "threads", "leaks"]


STREAMS = [
    "--streamed half",
    "--streamed all",
    "--streamed half --slots 1",
    "--streamed half --slots 4",
    "--late half",
    "--late one --streamed half --slots 1",
    "--late all --streamed half",
]


def run_tests(program: Path, tests: list[str], threads: int = 1, options: str = "") -> None:
    environment = {
        **os.environ,
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # threads that spin for each other take ages on a busy machine
    }
    command = [str(program), "--threads", str(threads), *options.split(), *tests]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert run.returncode == 0, "\n".join(failed[:40]) + run.stderr[-8000:]
    assert run.stdout.splitlines()[-1] == "0 failed"


def test_every_test_is_run(bridge: ggml_bridge.Bridge) -> None:
    program = build_native("split_test", bridge.libraries.folder)
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, timeout=60)
    assert listed.stdout.split() == TESTS


@pytest.mark.parametrize("name", TESTS)
def test_split_backend(bridge: ggml_bridge.Bridge, name: str) -> None:
    run_tests(build_native("split_test", bridge.libraries.folder), [name])


def test_split_backend_with_two_threads(bridge: ggml_bridge.Bridge) -> None:
    run_tests(build_native("split_test", bridge.libraries.folder), ["graphs", *THREADED], threads=2)


@pytest.mark.parametrize("options", STREAMS)
def test_split_backend_that_streams(bridge: ggml_bridge.Bridge, options: str) -> None:
    tests = TESTS if options == STREAMS[0] else ["types-dense", "types-moe", "graphs", *THREADED]
    run_tests(build_native("split_test", bridge.libraries.folder), tests, options=options)


def test_split_backend_under_address_sanitizer(bridge: ggml_bridge.Bridge) -> None:
    program = build_native("split_test", bridge.libraries.folder, "address,undefined")
    run_tests(program, TESTS)
    run_tests(program, [*THREADED, "graphs", "tokens"], options="--streamed half --late half")


def test_split_backend_under_thread_sanitizer(bridge: ggml_bridge.Bridge) -> None:
    program = build_native("split_test", bridge.libraries.folder, "thread")
    run_tests(program, ["graphs", *THREADED])
    run_tests(program, THREADED, options="--streamed half")
    run_tests(program, THREADED, options="--streamed half --late half")
