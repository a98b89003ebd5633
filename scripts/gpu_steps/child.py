"""Running a step's child processes: with a deadline, killable as a whole, what they say kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 6.0
"""What a child that is told to stop gets to write what it has."""


@dataclass(frozen=True)
class Ended:
    """How a child ended. status: its exit status, negative for a signal; late: it was stopped at its deadline."""

    status: int
    late: bool
    out: str
    said: str  # the last line on stderr
    seconds: float


def add_tests() -> None:
    """Let the tests' model factory and plans be imported."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)


def run_child(command: Sequence[str], limit_s: float, log: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command of at most `limit_s`; stdout is returned, stderr goes to the log. Late, it gets Ctrl-C, and GRACE_S
    later it is killed with all its children."""
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        errors.write(f"$ {' '.join(command)}\n".encode())
        errors.flush()
        begin = errors.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace",
            env={**os.environ, **(env or {})}, start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            out, _ = process.communicate(timeout=max(1.0, limit_s - GRACE_S))
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGINT)
            try:
                out, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    with log.open("rb") as written:
        written.seek(begin)
        lines = [line for line in written.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return Ended(process.returncode, late, out, lines[-1][:400] if lines else "", time.monotonic() - start)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; [] where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
