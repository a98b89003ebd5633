"""Servers that an experiment talks to."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from oallama.device.interrupt import held_interrupt

T = TypeVar("T")
START_S = 300.0


@contextmanager
def running(
    command: Sequence[str], log: Path, answer: Callable[[], T], env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], T]]:
    """The process, and what `answer` says once it says something; until the end of the block. Exits with the end of its
    log where it ends before that, or takes START_S."""
    process = None
    try:
        with log.open("wb") as out, held_interrupt():  # it would leave a process that has begun, and that nobody knows
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        deadline = time.monotonic() + START_S
        while not (found := answer()):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"error: {command[0]} does not answer: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield process, found
    finally:
        if process is not None:
            process.terminate()
            process.wait(60)
