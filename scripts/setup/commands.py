"""Running other programs: logged, killable as a whole, with the faults they show turned into one sentence."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from .console import Console, SetupStep
from .errors import SetupError, remedy

TAIL_LINES = 15
_COUNTERS = (re.compile(r"^\s*\[(\d+/\d+)\]"), re.compile(r"^\s*\[\s*(\d+%)\]"))  # ninja, make
_TROUBLE = re.compile(r"error|fail|denied|No space|Killed|unreachable|resolution", re.IGNORECASE)


def build_counter(line: str) -> str | None:
    """`57/197` or `45%` out of a line of ninja's or make's output, None for any other line."""
    for pattern in _COUNTERS:
        if match := pattern.match(line):
            return match.group(1)
    return None


def capture(
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float = 30.0,
    merge_stderr: bool = False,
    cwd: str | None = None,
) -> str | None:
    """Standard output of a short query; None when the program is missing, fails or does not answer in time."""
    try:
        done = subprocess.run(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge_stderr else subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run(
    console: Console,
    step: SetupStep,
    command: Sequence[str],
    env: Mapping[str, str],
    what: str,
    cwd: Path | None = None,
) -> None:
    """Run a command to its end with its output in the log; its counter goes to `step`.

    Raises SetupError ("`what` failed: remedy") when it ends with another status than 0. On any exception, Ctrl-C
    included, the command and all its children are ended first.
    """
    base = os.environ
    console.log_command(command, {key: value for key, value in env.items() if base.get(key) != value})
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a group of its own, so that compilers end with it
        )
    except OSError as error:
        raise SetupError(f"{what} failed: {command[0]} cannot be started ({error.strerror})") from error
    try:
        tail, trouble = _follow(console, step, process)
    except BaseException:
        _end_group(process)
        raise
    if process.returncode != 0:
        advice = remedy(tail) or remedy(trouble) or "the log has the details"
        raise SetupError(f"{what} failed: {advice}", tail)


def compiles(
    compiler: Sequence[str], source: str, env: Mapping[str, str], last: Sequence[str] = (), suffix: str = ".cpp"
) -> bool:
    """Whether a compiler takes a small program. last: its arguments behind the program."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"check{suffix}")
        file.write_text(source, encoding="utf-8")
        return capture([*compiler, str(file), *last], env, cwd=folder) is not None


def cmake_configure(
    console: Console, step: SetupStep, cmake: str, source: Path, folder: Path, flags: Sequence[str],
    env: Mapping[str, str], what: str,
) -> None:  # fmt: skip
    """CMake's configuration, with ninja where it is there: one count over all programs; a build that goes on keeps what
    it began with. Raises SetupError."""
    command = [cmake, "-S", str(source), "-B", str(folder), *flags]
    if shutil.which("ninja", path=env.get("PATH")) and not (folder / "CMakeCache.txt").exists():
        command += ["-G", "Ninja"]
    run(console, step, command, env, f"configuring {what}")


def cmake_build(
    console: Console, step: SetupStep, cmake: str, folder: Path, jobs: int, targets: Sequence[str],
    env: Mapping[str, str], what: str,
) -> None:  # fmt: skip
    """Compile targets of what was configured. Raises SetupError."""
    command = [cmake, "--build", str(folder), "--parallel", str(jobs), "--target", *targets]
    run(console, step, command, env, f"compiling {what}")


def _follow(console: Console, step: SetupStep, process: subprocess.Popen[str]) -> tuple[deque[str], deque[str]]:
    """Read the output until the process ends. Returns the last lines, and the last that speak of trouble."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    stdout = process.stdout

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    trouble: deque[str] = deque(maxlen=200)
    counter = ""
    while True:
        try:
            line = lines.get(timeout=1.0)  # so that the clock moves while the compiler is silent
        except queue.Empty:
            step.progress(counter)
            continue
        if line is None:
            break
        console.write_log(line)
        tail.append(line.rstrip()[:400])
        if found := build_counter(line):
            counter = found
        elif _TROUBLE.search(line):
            trouble.append(line.rstrip()[:400])
        step.progress(counter)
    process.wait()
    return tail, trouble


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
