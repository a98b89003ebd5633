"""Prints one line per step with its seconds on stderr, and logs everything else; runs programs as process groups that
end with this process.

A failed program's output becomes one sentence, with the remedy for a known fault.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from oallama.core.errors import OallamaError
from oallama.core.files import lock_file, open_lock
from oallama.core.units import format_seconds

TAIL_LINES, SEARCHED_LINES = 15, 200  # of a failed program: shown, and searched for a known fault
DRIVER_S = 60.0  # a driver that has to wake several cards may take so long to answer
REPORT_EVERY_S = {True: 0.1, False: 30.0}
"""Seconds between two reports of progress, by whether there is a terminal."""
_COUNTER = re.compile(r"^\s*\[\s*(\d+/\d+|\d+%)\]")  # ninja's or make's
_REMEDIES = (  # most specific first: a full disk also breaks the compiler, a dead network also finds no version
    (
        r"No space left on device|\[Errno 28\]|Disk quota exceeded|os error 28",
        "the disk is full: free about 2 GB, or set OALLAMA_CACHE_DIR to a folder on another disk",
    ),
    (
        r"Killed signal terminated program|(fatal|internal compiler) error: Killed|virtual memory exhausted",
        "the compiler ran out of memory: run again with CMAKE_BUILD_PARALLEL_LEVEL=1",
    ),
    (
        r"ensurepip is not available|No module named '?(venv|ensurepip|pip)",
        "Python's venv module is missing: install it (Debian and Ubuntu: sudo apt install python3-venv)",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate|UnknownIssuer",
        "the package index's certificate is not trusted: set SSL_CERT_FILE (or PIP_CERT) to your certificate bundle, "
        "or correct the clock",
    ),
    (
        r"name resolution|Name or service not known|NewConnectionError|Network is unreachable|[Cc]onnection refused"
        r"|TimeoutError|timed out|ProxyError|dns error|failed to lookup address|error sending request"
        r"|tcp connect error|Max retries exceeded",
        "cannot reach the package index: check the network, or name a mirror in UV_DEFAULT_INDEX or PIP_INDEX_URL",
    ),
    (
        r"Hash mismatch|DO NOT MATCH THE HASHES",
        "a package from the index has another hash than the reviewed one: name another index in "
        "UV_DEFAULT_INDEX or PIP_INDEX_URL",
    ),
    (
        r"No solution found|No matching distribution found|Could not find a version|not found in the package registry",
        "the package index lacks a required version: check UV_DEFAULT_INDEX or PIP_INDEX_URL and that this "
        "Python is supported, or set OALLAMA_UNLOCKED=1 to accept other versions",
    ),
    (
        r"No CMAKE_CXX?_COMPILER could be found|is not able to compile a simple test program",
        "no working C++ compiler: install one (Debian and Ubuntu: sudo apt install g++)",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "nvcc does not support this C++ compiler: set CUDAHOSTCXX to a supported one, or OALLAMA_BACKEND=cpu",
    ),
    (r"Permission denied|\[Errno 13\]", "cannot write a file: check who owns the project and the cache folder"),
)


class SetupError(OallamaError):
    """Setup cannot continue: what is wrong and what to do. `tail`: the last lines of the failed program, if any."""

    def __init__(self, message: str, tail: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tail = tuple(tail)


def remedy(output: Iterable[str]) -> str | None:
    """Return the remedy for the first known fault in the output of a failed program; None if unknown."""
    text = "\n".join(output)
    return next((advice for pattern, advice in _REMEDIES if re.search(pattern, text)), None)


class Step:
    """A step in progress. result: text of its line at the end."""

    def __init__(self, console: Console, name: str, doing: str) -> None:
        self.result = self.doing = doing
        self._console, self._name = console, name
        self.start_s = self._reported_s = time.monotonic()
        self.progress("")

    def announce(self, what: str) -> None:
        """Print a separate line before work that takes minutes."""
        self._console.line(self._name, what)

    def progress(self, counter: str) -> None:
        """Show a program's progress (`57/197`): on a terminal at once, otherwise every half minute."""
        now_s = time.monotonic()
        took = format_seconds(now_s - self.start_s)
        if now_s != self.start_s and now_s - self._reported_s < REPORT_EVERY_S[self._console.tty]:
            return
        self._reported_s = now_s
        if self._console.tty:
            self._console.overwrite(f"  {self._name:<12}  {self.doing} … {counter} {took}")
        elif counter:
            self._console.line(self._name, f"{self.doing} … {counter}  ({took})")


class Console:
    """Writes to `stream` for the user and, once `open_log` was called, to the file `log_path`."""

    def __init__(self, stream: TextIO, log_path: Path) -> None:
        self.stream, self.log_path = stream, log_path
        self.tty = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._log: TextIO | None = None

    @contextmanager
    def step(self, name: str, doing: str) -> Iterator[Step]:
        """One step; its line is printed when it ends without an exception."""
        self.write_log(f"\n=== {name}: {doing}\n")
        step = Step(self, name, doing)
        yield step
        self.line(name, f"{step.result}  ({format_seconds(time.monotonic() - step.start_s)})")

    def line(self, name: str, text: str) -> None:
        self.say(f"  {name:<12}  {text}")

    def say(self, text: str) -> None:
        if self.tty:
            self.stream.write("\r\x1b[2K")
        print(text, file=self.stream, flush=True)
        self.write_log(text + "\n")

    def overwrite(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns - 1
        self.stream.write(f"\r{text[:columns]:<{columns}}")
        self.stream.flush()

    def open_log(self) -> None:
        """Start a new log. Before this call output is not logged, as another setup may be writing to the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("w", encoding="utf-8", errors="replace")

    def write_log(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text)
            self._log.flush()


def run(
    console: Console, step: Step, command: Sequence[str], env: Mapping[str, str], what: str, cwd: Path | None = None
) -> None:
    """Run a program to its end, its output in the log and its counter in `step`.

    Raises SetupError ("`what` failed: remedy") if it fails. On any exception, Ctrl-C included, ends the program and all
    of its children first.
    """
    console.write_log(f"$ {shlex.join(command)}\n")
    try:
        process = subprocess.Popen(
            command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SetupError(f"{what} failed: cannot start {command[0]} ({error.strerror})") from error
    lines: deque[str] = deque(maxlen=SEARCHED_LINES)
    counter = ""
    try:
        for line in _lines(process):
            if line is not None:
                console.write_log(line + "\n")
                lines.append(line.rstrip()[:400])
                if found := _COUNTER.match(line):
                    counter = found[1]
            step.progress(counter)
        process.wait()
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(timeout=5)
        raise
    if process.returncode != 0:
        tail = list(lines)[-TAIL_LINES:]  # an earlier fault may have been overcome
        raise SetupError(f"{what} failed: {remedy(tail) or remedy(lines) or 'see the log'}", tail)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Yield a program's lines as they come, and None for each second without a line, so that the time that is shown
    goes on and Ctrl-C never waits."""
    assert process.stdout is not None
    file, rest = process.stdout.fileno(), b""
    while True:
        if not select.select([file], [], [], 1.0)[0]:
            yield None
            continue
        data = os.read(file, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in (lines if data else [rest] if rest else []))
        if not data:
            return


def capture(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float = 30.0, merge_stderr: bool = False,
    cwd: str | None = None,
) -> str | None:  # fmt: skip
    """Return the standard output of a short query; None if the program is missing, fails or times out."""
    stderr = subprocess.STDOUT if merge_stderr else subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            encoding="utf-8", errors="replace", timeout=timeout_s,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def compiles(
    compiler: Sequence[str], source: str, env: Mapping[str, str], last: Sequence[str] = (), suffix: str = ".cpp"
) -> bool:
    """Whether a compiler compiles a small program. last: arguments after the program."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"check{suffix}")
        file.write_text(source, encoding="utf-8")
        return capture([*compiler, str(file), *last], env, cwd=folder) is not None


@contextmanager
def lock(path: Path, console: Console) -> Iterator[None]:
    """Hold a lock file; if another process holds it, say so and wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_lock(path)
    except OSError as error:
        raise SetupError(f"cannot write {path} ({error.strerror}): set OALLAMA_CACHE_DIR to another folder") from error

    def wait() -> None:
        file.seek(0)
        console.say(f"  another set-up is running (process {file.read().strip() or 'unknown'}): waiting until it ends")

    with file:
        lock_file(file, wait)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def guarded(console: Console, what: str, job: Callable[[], int]) -> int:
    """Return the exit status of `job`; explain Ctrl-C, a known fault and a full disk in one sentence."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    try:
        return job()
    except KeyboardInterrupt:
        console.say(f"{what} interrupted: run it again to continue")
        return 130
    except OSError as error:
        full = "the disk is full: free about 2 GB" if error.errno == 28 else "check that the folder is writable"
        console.say(f"error: {error.filename or 'a file'}: {error.strerror or error}: {full}")
        return 1
    except OallamaError as error:
        tail = getattr(error, "tail", ())
        if tail:
            console.say("\n    ".join(("  the last lines were:", *tail)))
            console.say(f"  the whole log is {console.log_path}")
        console.say(f"error: {error}")
        return error.exit_code
