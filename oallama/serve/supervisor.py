"""Keeps a server program running: starts it, checks its health, restarts it with a back-off, ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from oallama.core.errors import DeviceError
from oallama.run.process import Launch, ServerProcess, start_failure, wait_until

ServerStatus = Literal["starting", "ready", "waiting", "ended"]
"""starting: the program loads the model; waiting: it ended and will restart."""

IDLE_SHARE = 0.001  # share of a core; a program that uses more is computing


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds: before the second start (doubled after each failure, up to longest_s), for loading the model,
    between checks, without an answer until the program counts as hung, of health until failures are forgotten, from
    SIGTERM to SIGKILL. n_starts: failed starts in succession that end the server."""

    first_s: float = 0.5
    longest_s: float = 30.0
    start_s: float = 1800.0
    look_s: float = 1.0
    answer_s: float = 60.0
    steady_s: float = 60.0
    end_s: float = 5.0
    n_starts: int = 5

    def backoff_s(self, n_failures: int) -> float:
        """Return the pause before the next start, after this many consecutive failures."""
        return min(self.longest_s, self.first_s * 2.0 ** max(0, min(n_failures, 30) - 1))


PATIENCE = Patience()


@dataclass(slots=True)
class State:
    """State of the program. said: how it differs from the requested placement, in one sentence."""

    status: ServerStatus = "starting"
    on_device: bool = False
    device_lost: bool = False
    said: str | None = None
    restarts: int = 0
    pid: int | None = None
    ready_at: float | None = None  # time.time()


@dataclass
class Supervisor:
    """launch: how to start the program; fallback: how to start it after the loss of the device, None without a device;
    instead: what computes then, the CPU or the remaining devices.

    healthy: whether the process of this number answers at its port. device_gone: returns why the device is lost, else
    None; called once the program has ended, as it may take a while. on_ready: called when it answers, after each start.
    server_log: gets the program's lines. log: gets sentences for people.
    """

    launch: Launch
    fallback: Launch | None
    healthy: Callable[[int], bool]
    on_ready: Callable[[], None] = lambda: None
    log: Callable[[str], None] = lambda sentence: None
    server_log: Callable[[bytes], None] = lambda line: None
    patience: Patience = PATIENCE
    state: State = field(default_factory=State)
    instead: str = "the CPU"
    device_gone: Callable[[], str | None] = lambda: None

    def __post_init__(self) -> None:
        self._process: ServerProcess | None = None
        self._stopped = False
        self.state.on_device = self.launch.uses_device

    def stop(self) -> None:
        """Make `run` end the program and return. For signal handlers: it only sets a flag."""
        self._stopped = True

    def run(self) -> None:
        """Run until `stop`; on return or any exception the program has ended. Raises DeviceError if the first start
        fails with its device present, or n_starts later starts in succession."""
        try:
            self._run()
        finally:
            self._set_status("ended")
            self._end()

    def _run(self) -> None:
        n_failures, was_ready = 0, False
        while not self._stopped:
            why = self._start()
            started = why is None
            if started and not self._stopped:
                was_ready, begun = True, time.monotonic()
                self.on_ready()
                why = self._watch()
                if time.monotonic() - begun > self.patience.steady_s:
                    n_failures = 0
            if self._stopped or why is None:
                return
            ran = self._process is not None
            self._set_status("waiting")
            self._end()
            can_go_on = self.fallback is not None and self.launch is not self.fallback and self.launch.uses_device
            lost = self.device_gone() if can_go_on else None
            if not (was_ready or lost):
                raise DeviceError(f"llama-server does not start: {why}")
            n_failures += 1
            self.state.restarts += 1
            if self.fallback is not None and can_go_on and (lost or (ran and not started)):
                self._fall_back(self.fallback, lost or why)
                n_failures = 0
                continue
            if n_failures >= self.patience.n_starts and not started:
                raise DeviceError(f"llama-server failed {n_failures} restarts; last error: {why}")
            pause_s = self.patience.backoff_s(n_failures)
            self.state.said = f"llama-server ended: {why}; restarting"
            self.log(f"llama-server ended: {why}; restarting in {pause_s:.1f} s")
            wait_until(lambda: self._stopped, pause_s)

    def _fall_back(self, fallback: Launch, why: str) -> None:
        self.launch = fallback
        self.state.on_device, self.state.device_lost = fallback.uses_device, True
        self.state.said = f"the device was lost ({why}); running on {self.instead} until oallama is restarted"
        self.log(f"the device was lost ({why}); restarting on {self.instead} alone, which is slower")

    def _start(self) -> str | None:
        """Start the program and wait until it is healthy. Returns why it is not healthy, else None."""
        self._set_status("starting")
        try:
            process = self._process = ServerProcess(self.launch, self.server_log)
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}"
        self.state.pid = process.pid
        why = start_failure(process, lambda pid: self._stopped or self.healthy(pid), self.patience.start_s)
        if why is None and not self._stopped:
            self._set_status("ready")
        return why

    def _watch(self) -> str | None:
        """Wait until the program needs a restart; return why: it ended, or hangs; None after `stop`."""
        process = self._process
        assert process is not None
        answered, used_s = time.monotonic(), process.cpu_s
        while not wait_until(lambda: self._stopped or process.has_ended, self.patience.look_s):
            silent_s = time.monotonic() - answered
            computed_s = process.cpu_s - used_s
            if self.healthy(process.pid) or computed_s > IDLE_SHARE * silent_s:  # all its connections may be busy
                answered, used_s = time.monotonic(), process.cpu_s
            elif silent_s > self.patience.answer_s:
                return f"it has neither answered nor computed for {self.patience.answer_s:.0f} s"
        return process.how_it_ended() if process.has_ended else None

    def _set_status(self, status: ServerStatus) -> None:
        self.state.status, self.state.ready_at = status, time.time() if status == "ready" else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(self.patience.end_s)
            self.state.pid = None
