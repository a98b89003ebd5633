"""The command line in this process; processes that must come about, and must have ended."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

Found = TypeVar("Found")

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "oallama")
PATIENCE_S = 120.0  # for what comes at once where nothing else runs


def here(
    *arguments: object, code: int = 0, cache: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command line in this process; check its exit code, and that a failure is one line. cache: its cache folder.
    What native libraries print is not seen."""
    from oallama.cli.main import exit_code

    words, out, err = [*map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patched.chdir(ROOT)
        patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input.encode())))
        if cache is not None:
            patched.setenv("OALLAMA_CACHE_DIR", str(cache))
        found = exit_code(words)
    done = subprocess.CompletedProcess(words, found, out.getvalue(), err.getvalue())
    assert found == code, done.stderr
    assert "Traceback" not in done.stderr
    assert not code or done.stderr.splitlines()[-1].startswith("oallama: "), done.stderr
    return done


def until(holds: Callable[[], Found]) -> Found:
    """Wait for it; what it then is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"it did not come about within {PATIENCE_S:g} s"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def must_end(*pids: int) -> None:
    until(lambda: not any(map(alive, pids)))


def children_with(word: str) -> list[psutil.Process]:
    """What runs below this process with this word in its command line."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if word in child.cmdline():
                found.append(child)
    return found
