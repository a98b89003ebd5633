"""Keeps a server program running: starts it, asks whether it is healthy, starts it again with a back-off, ends it.

Linux kills the program when the thread that started it ends, so everything but reading its lines happens in the thread
that calls `run`, which has to be the main one.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ggml_bridge.errors import signal_name
from ggml_bridge.threads import Thread
from oallama.core.errors import DeviceError
from oallama.serve.launch import with_us

Phase = Literal["starting", "ready", "waiting", "ended"]
"""starting: it loads the model; waiting: it ended and is about to be started again."""

TAIL_LINES = 200
LINE_BYTES = 1 << 16
POLL_S = 0.1
IDLE_SHARE = 0.001  # of a core; a program that uses more computes


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to start the program."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    uses_device: bool


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: before the second start (doubled after each failure, up to longest_s), for loading the model, between
    checks, without an answer until it counts as hung, of health until failures are forgotten, from SIGTERM to SIGKILL.
    n_starts: failed starts in succession that end the server."""

    first_s: float = 0.5
    longest_s: float = 30.0
    start_s: float = 1800.0
    look_s: float = 1.0
    answer_s: float = 60.0
    steady_s: float = 60.0
    end_s: float = 5.0
    n_starts: int = 5

    def backoff_s(self, n_failures: int) -> float:
        """Pause before the next start, after so many failures in succession."""
        return min(self.longest_s, self.first_s * 2.0 ** max(0, min(n_failures, 30) - 1))


PATIENCE = Patience()


@dataclass(slots=True)
class State:
    """The program now. said: why it is not what was asked for, in one sentence."""

    phase: Phase = "starting"
    on_device: bool = False
    device_lost: bool = False
    said: str | None = None
    restarts: int = 0
    pid: int | None = None
    ready_at: float | None = None  # time.time()


@dataclass
class Supervisor:
    """launch: how to start the program; on_cpu: how without the device once that is lost, None where there is none.

    healthy: whether the process of this number answers at its port. device_lost: why the device is known to be gone,
    None while it is not. on_ready: called once it answers, after each start. log: gets the program's lines. talk:
    sentences for people.
    """

    launch: Launch
    on_cpu: Launch | None
    healthy: Callable[[int], bool]
    device_lost: Callable[[], str | None] = lambda: None
    on_ready: Callable[[], None] = lambda: None
    talk: Callable[[str], None] = lambda sentence: None
    log: Callable[[bytes], None] = lambda line: None
    patience: Patience = PATIENCE
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader: Thread | None = None
        self._stopped = False
        self.state.on_device = self.launch.uses_device

    def stop(self) -> None:
        """Have `run` end the program and return. For signal handlers: it only sets a flag."""
        self._stopped = True

    def run(self) -> None:
        """Run until `stop`; the program has ended then, as it has after any exception. Raises DeviceError where the
        program does not start at first, or n_starts times in succession later."""
        try:
            self._run()
        finally:
            self._set_phase("ended")
            self._end()

    def _run(self) -> None:
        n_failures, was_ready = 0, False
        while not self._stopped:
            why = self._start()
            started = why is None
            if why is None:
                was_ready, begun = True, time.monotonic()
                self.on_ready()
                why = self._watch()
                if time.monotonic() - begun > self.patience.steady_s:
                    n_failures = 0
            if self._stopped:
                return
            ran = self._process is not None
            self._set_phase("waiting")
            self._end()
            if not was_ready:
                raise DeviceError(f"llama-server does not start: {why}")
            n_failures += 1
            self.state.restarts += 1
            lost = self.device_lost() if self.launch.uses_device else None
            if self.on_cpu is not None and self.launch.uses_device and (lost or (ran and not started)):
                self._continue_on_cpu(self.on_cpu, lost or why)
                n_failures = 0
                continue
            if n_failures >= self.patience.n_starts and not started:
                raise DeviceError(f"llama-server failed {n_failures} restarts; last error: {why}")
            pause_s = self.patience.backoff_s(n_failures)
            self.state.said = f"llama-server ended: {why}; restarting"
            self.talk(f"llama-server ended: {why}; restarting in {pause_s:.1f} s")
            self._wait(pause_s)

    def _continue_on_cpu(self, on_cpu: Launch, why: str) -> None:
        self.launch = on_cpu
        self.state.on_device, self.state.device_lost = False, True
        self.state.said = f"the device was lost ({why}); running on the CPU until oallama is restarted"
        self.talk(f"the device was lost ({why}); restarting on the CPU alone, which is slower")

    def _start(self) -> str | None:
        """Start the program and wait until it is healthy. Returns why it is not; None where it is."""
        self._set_phase("starting")
        self._tail.clear()
        command, environment = with_us(self.launch.command, self.launch.environment)
        try:
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C comes to us
            )
        except OSError as error:  # too many processes, or no memory for one more
            return f"it cannot be started: {error.strerror or error}"
        self.state.pid = process.pid
        self._reader = Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        deadline = time.monotonic() + self.patience.start_s
        while time.monotonic() < deadline:
            if self._has_ended_within(POLL_S):
                return self._how_it_ended()
            if self.healthy(process.pid):
                self._set_phase("ready")
                return None
        return f"it does not answer after {self.patience.start_s:.0f} s"

    def _watch(self) -> str:
        """Return why the program is to be started again, once it is: it ended, lost its device, or hangs."""
        assert self._process is not None
        pid, answered, used_s = self._process.pid, time.monotonic(), self._cpu_s()
        while not self._has_ended_within(self.patience.look_s):
            if self.launch.uses_device and (lost := self.device_lost()):
                return lost
            silent_s = time.monotonic() - answered
            if self.healthy(pid) or self._cpu_s() - used_s > IDLE_SHARE * silent_s:  # all its connections may be busy
                answered, used_s = time.monotonic(), self._cpu_s()
            elif silent_s > self.patience.answer_s:
                return f"it has neither answered nor computed for {self.patience.answer_s:.0f} s"
        return self._how_it_ended()

    def _cpu_s(self) -> float:
        """Return the processor time that the program has used; 0 once it has ended."""
        import psutil

        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.state.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _has_ended_within(self, seconds: float) -> bool:
        """Wait; return whether the program has ended, or `stop` was called."""
        return self._wait(seconds, self._process)

    def _wait(self, seconds: float, process: subprocess.Popen[bytes] | None = None) -> bool:
        deadline = time.monotonic() + seconds
        while not self._stopped and (process is None or process.poll() is None):
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(left_s, POLL_S))
        return True

    def _how_it_ended(self) -> str:
        assert self._process is not None
        if self._stopped:
            return "it was stopped"
        if self._reader is not None:
            self._reader.join(1.0)
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        words = last_words(list(self._tail))
        return f"{how}: {words}" if words else how

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Keep the program's last lines, each cut to LINE_BYTES."""
        assert process.stdout is not None
        while line := process.stdout.readline(LINE_BYTES):
            self._tail.append(line.decode(errors="replace").rstrip())
            self.log(line)

    def _set_phase(self, phase: Phase) -> None:
        self.state.phase, self.state.ready_at = phase, time.time() if phase == "ready" else None

    def _end(self) -> None:
        """End the program: SIGTERM, and SIGKILL where that is not enough."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            process.wait(self.patience.end_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            self.state.pid = None
        if self._reader is not None:
            self._reader.join(1.0)


def last_words(lines: Sequence[str]) -> str:
    """The last line that speaks of an error, else the last one; cut to what a sentence can hold."""
    written = [line for line in lines if line.strip()]
    telling = [
        line for line in written if any(word in line.lower() for word in ("error", "failed", "abort", "crashed"))
    ]
    chosen = (telling or written or [""])[-1].strip()
    return chosen if len(chosen) <= 300 else chosen[:299] + "…"
