"""Runs pytest again and again, each time in a fork of one process that has imported what takes long.

stdin: a JSON line for each run, {"arguments", "log", "limit_s"}; stdout: its exit status, negative for a signal.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

import click  # noqa: F401
import hypothesis.strategies  # noqa: F401
import jinja2  # noqa: F401
import numpy  # noqa: F401
import pytest

MEMORY_BYTES = 8 << 30
"""Of address space: a fault may ask for memory without end."""


def run(arguments: list[str], log: str, limit_s: float) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        status = int(pytest.main(arguments))
        sys.stdout.flush()
        os._exit(status)
    deadline = time.monotonic() + limit_s
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it has started
    if not ended:
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    gc.freeze()
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)
