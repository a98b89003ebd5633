"""llama-server as a process: its start, its log, and how it ended."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from ggml_bridge.errors import signal_name
from ggml_bridge.threads import Thread
from oallama.device.interrupt import held_interrupt
from oallama.run.die_with_parent import ending_with_parent

TAIL_LINES = 200
OF_REQUESTS = ("send_error", "process_sing")  # functions of llama-server that log that one is refused
LINE_BYTES = 1 << 16
NOT_LOADED = "exiting due to model loading error"
FIRST_POLL_S, POLL_S = 0.005, 0.1  # between looks at a program; the first, and the longest
_TIME = re.compile(r"\d+(\.\d+){3} [A-Z] +")  # and the level, which llama-server writes before a line


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the program: command and environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    uses_device: bool


class ServerProcess:
    """A started program, which Linux kills when this process ends. log: called with each line that the program writes.

    Linux kills a child when the thread that started it ends, so the thread that reads its output starts it.
    """

    def __init__(self, launch: Launch, log: Callable[[bytes], None] = lambda line: None) -> None:
        """Raises OSError if it cannot be started: too many processes, or no memory for one more; MemoryError."""
        self._log = log
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        started: Future[subprocess.Popen[bytes]] = Future()
        self._reader = Thread(target=self._run, args=(launch, started), daemon=True)
        with held_interrupt():
            self._reader.start()
            self._process = started.result()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def cpu_s(self) -> float:
        """Its processor time; 0 once it has ended."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    @property
    def rss_bytes(self) -> int:
        """Its resident memory; 0 once it has ended."""
        import psutil

        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def how_it_ended(self) -> str:
        """The exit code or signal in words, with the last error line of its log."""
        self._reader.join(1.0)
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        words = last_words(list(self._tail))
        return f"{how}: {words}" if words else how

    def end(self, patience_s: float) -> None:
        """End it: SIGTERM, then SIGKILL if it does not end in time. May be called twice."""
        process = self._process
        try:
            process.terminate()
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        if threading.current_thread() is not self._reader:  # a garbage collection may end it there
            self._reader.join(1.0)

    def _run(self, launch: Launch, started: Future[subprocess.Popen[bytes]]) -> None:
        """Start the program and keep its last lines, each cut to LINE_BYTES."""
        try:
            command, environment = ending_with_parent(launch.command, launch.environment)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C comes to us
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        assert process.stdout is not None
        with process.stdout as lines:
            while line := lines.readline(LINE_BYTES):
                self._tail.append(line.decode(errors="replace").rstrip())
                self._log(line)
        with suppress(ChildProcessError):  # it has been waited for
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it would end with this thread


def start_failure(process: ServerProcess, is_healthy: Callable[[int], bool], seconds: float) -> str | None:
    """Wait until a program is healthy; is_healthy gets its process id. Returns why it is not, else None."""
    in_time = wait_until(lambda: process.has_ended or is_healthy(process.pid), seconds)
    if process.has_ended:
        return process.how_it_ended()
    return None if in_time else f"it does not answer after {seconds:.0f} s"


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition, at first often; returns whether it held in time."""
    deadline, pause_s = time.monotonic() + seconds, FIRST_POLL_S
    while not holds():
        if (left_s := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(left_s, pause_s))
        pause_s = min(POLL_S, 1.2 * pause_s)
    return True


def last_words(lines: Sequence[str]) -> str:
    """The most informative log line: the first one that says that the model could not be loaded, else the last error,
    else the last line that is not about a single request. Without its time, and shortened."""
    written = [line for line in lines if line.strip() and not any(word in line for word in OF_REQUESTS)]
    telling = [
        line for line in written if any(word in line.lower() for word in ("error", "failed", "abort", "crashed"))
    ]
    chosen = (telling or written or [""])[-1]
    if NOT_LOADED in chosen:
        chosen = telling[0]
    chosen = _TIME.sub("", chosen.strip())
    return chosen if len(chosen) <= 300 else chosen[:299] + "…"
