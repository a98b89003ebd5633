"""Child processes of an experiment: each has a deadline, ends with all its own children, and writes to a log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    last_line: str  # on stderr
    seconds: float

    @property
    def why(self) -> str:
        """Why it failed, in a sentence."""
        return "time ran out" if self.late else self.last_line.removeprefix("oallama: ") or "it said nothing"


def add_tests() -> None:
    """Let the tests' model factory and plans be imported."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)


def run_child(command: Sequence[str], limit_s: float | None, log: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command of at most `limit_s` seconds; stdout is returned, stderr goes to the log. Late or interrupted, it
    gets Ctrl-C, and GRACE_S later it is killed with all its children. Raises KeyboardInterrupt where it was
    interrupted."""
    from oallama.device.interrupt import held_interrupt  # scripts/gpu_run begins without it

    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        errors.write(f"$ {' '.join(command)}\n".encode())
        errors.flush()
        begin = errors.tell()
        late, process = False, None
        try:
            with held_interrupt():  # it would leave a process that has begun, and that nobody knows
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                    errors="replace", env={**os.environ, **(env or {})}, start_new_session=True,
                )  # fmt: skip
            out, _ = process.communicate(timeout=None if limit_s is None else max(1.0, limit_s - GRACE_S))
        except subprocess.TimeoutExpired:
            assert process is not None
            late, out = True, _stop(process)
        except BaseException:
            if process is not None:
                _stop(process)
            raise
    with log.open("rb") as written:
        written.seek(begin)
        lines = [line for line in written.read().decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:400] if lines else ""
    return Ended(process.returncode, late, out, last, time.monotonic() - start)


def _stop(process: subprocess.Popen[str]) -> str:
    """End a process and its children. Returns what it had printed."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        return process.communicate(timeout=GRACE_S)[0]
    except (subprocess.TimeoutExpired, KeyboardInterrupt, ProcessLookupError):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # its pipe is held by what left its group
            return process.communicate(timeout=GRACE_S)[0]  # without a limit it reads a pipe that may be closed by now
        process.wait()
        return ""


def oallama(*arguments: object, limit_s: float | None, log: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command of oallama."""
    return run_child([sys.executable, "-m", "oallama", *map(str, arguments)], limit_s, log, env)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; [] where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
