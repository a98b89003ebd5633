"""Bounds of what reading one input may take, and the one thing that may come out of it: an error of ours."""

from __future__ import annotations

import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oallama.core.errors import OallamaError

CPU_S = 2.0
MEMORY_BYTES = 512 << 20  # beside what the process has
MOST_SENTENCE = 2000  # characters of a refusal; it may repeat the input besides, at most twice as escapes


class TookTooLong(BaseException):
    """An input took more CPU time than it may: no reader's `except Exception` may hold it up."""


def accepted(check: Callable[[bytes, Path], None], raw: bytes) -> bool:
    """True where `check` reads the input, False where it refuses it with an OallamaError of one sentence.

    Anything else that it raises comes out, as does TookTooLong, also where a reader took that for an error of its own.
    """
    memory_folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files cost no disk there
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory_folder) as folder, _limits():
        begin = time.process_time()
        try:
            check(raw, Path(folder))
        except OallamaError as error:
            message = str(error)
            one_sentence = message.isprintable() and 0 < len(message) <= MOST_SENTENCE + 2 * len(raw)
            assert one_sentence, f"{type(error).__name__} without one clear sentence: {message[:500]!r}"
            return False
        if time.process_time() - begin > CPU_S:
            raise TookTooLong(f"more than {CPU_S:g} s")
        return True


@contextmanager
def _limits() -> Iterator[None]:
    """CPU time and memory of one input; a busy machine does not count."""

    def ring(*_: Any) -> None:
        raise TookTooLong(f"more than {CPU_S:g} s")

    before, limit = signal.signal(signal.SIGPROF, ring), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, limit[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGPROF, before)
