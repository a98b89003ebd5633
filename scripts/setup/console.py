"""One line a step with its time on stderr, everything else in the log file."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

REDRAW_EVERY_S = 0.1  # of the line on a terminal
REPORT_EVERY_S = 30.0  # between progress lines where there is no terminal
NAME_WIDTH = 12


def format_seconds(seconds: float) -> str:
    """`0.04 s`, `8.1 s`, `4 min 31 s`."""
    if seconds < 0.1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


class SetupStep:
    """A step in progress. `result` is what the finished line says; `progress` shows how far a long command is."""

    def __init__(self, console: Console, name: str, doing: str) -> None:
        self.result = doing
        self._console = console
        self._name = name
        self._doing = doing
        self._start = self._reported = time.monotonic()
        self._announced = False
        self._transient()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def change(self, doing: str) -> None:
        """Say what the step does now (on a terminal at once, otherwise with the next progress line)."""
        self.result = self._doing = doing
        self._transient()

    def progress(self, counter: str) -> None:
        """Show the counter (`57/197`, or nothing known: an empty string): live on a terminal, else every 30 s."""
        if time.monotonic() - self._reported < (REDRAW_EVERY_S if self._console.tty else REPORT_EVERY_S):
            return
        self._reported = time.monotonic()
        if self._console.tty:
            self._transient(counter)
        else:
            self._console.line(self._name, f"{self._doing} … {counter}".rstrip(), self.elapsed_s())

    def announce(self, what: str) -> None:
        """Print a line of its own before something that takes minutes."""
        self._console.line(self._name, what)

    def _transient(self, counter: str = "") -> None:
        if self._console.tty:
            text = f"  {self._name:<{NAME_WIDTH}}  {self._doing} … {counter}".rstrip()
            self._console.overwrite(f"{text} {format_seconds(self.elapsed_s())}")


class Console:
    """Writes to `stream` (the user) and `log` (the file named on failure)."""

    def __init__(self, stream: TextIO, log_path: Path) -> None:
        self.stream = stream
        self.log_path = log_path
        self.tty = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._log: TextIO | None = None

    @contextmanager
    def step(self, name: str, doing: str) -> Iterator[SetupStep]:
        """One step: its line, with the seconds it took, is printed when the block ends without an exception."""
        self.write_log(f"\n=== {name}: {doing}\n")
        step = SetupStep(self, name, doing)
        try:
            yield step
        except BaseException:
            self.clear()
            raise
        self.line(name, step.result, step.elapsed_s())

    def line(self, name: str, text: str, seconds: float | None = None) -> None:
        self.clear()
        took = "" if seconds is None else f"  ({format_seconds(seconds)})"
        self.say(f"  {name:<{NAME_WIDTH}}  {text}{took}")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)
        self.write_log(text + "\n")

    def overwrite(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns - 1
        self.stream.write(f"\r{text[:columns]:<{columns}}")
        self.stream.flush()

    def clear(self) -> None:
        if self.tty:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()

    def open_log(self) -> None:
        """Start the log anew. Until then nothing is logged: another set-up may be writing to it."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("w", encoding="utf-8", errors="replace")

    def write_log(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text)
            self._log.flush()

    def log_command(self, command: Sequence[str], extra_env: Mapping[str, str]) -> None:
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(extra_env.items()))
        self.write_log(f"$ {settings} {shlex.join(command)}\n".replace("$  ", "$ "))
