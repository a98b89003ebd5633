"""Keeps a server program running: started, asked whether it answers, started again with a back-off, ended with us.

Everything happens in one event loop, whose thread must outlive the program: Linux kills it when that thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ggml_bridge.errors import signal_name
from oallama.core.errors import DeviceError
from oallama.serve.launch import with_us

Phase = Literal["starting", "ready", "waiting", "stopped", "ended"]
"""starting: it loads the model; waiting: it ended and is about to be started again; stopped: on purpose, for now."""

TAIL_LINES = 200
LINE_BYTES = 1 << 16
STOPPED = "it is stopped for a while"


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to start the program. prepare: called before each start."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    uses_device: bool
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: between starts (doubled after each failure, up to the last), until it must answer, between looks at it,
    until it counts as hung or as well; and how often it may fail to start in succession."""

    first_s: float = 0.5
    longest_s: float = 30.0
    start_s: float = 1800.0
    look_s: float = 1.0
    answer_s: float = 60.0
    steady_s: float = 60.0
    end_s: float = 5.0
    n_starts: int = 5

    def backoff_s(self, n_failures: int) -> float:
        """Before the next start, after so many failures in succession."""
        return min(self.longest_s, self.first_s * 2.0 ** max(0, min(n_failures, 30) - 1))


PATIENCE = Patience()


@dataclass(slots=True)
class State:
    """What is known of the program now. said: why it is not what was asked for, in one sentence."""

    phase: Phase = "starting"
    on_device: bool = False
    device_lost: bool = False
    said: str | None = None
    restarts: int = 0
    pid: int | None = None
    ready_at: float | None = None  # time.time()


@dataclass
class Supervisor:
    """launch: how it is wanted; on_cpu: without the device, for when that is lost, None where there is none.

    answers: whether the program is ready now; heard: whether it has lately sent something, so need not be asked
    whether it hangs. device_lost: why the device is known to be gone, None while it is not.
    log: what the program writes, line by line. talk: sentences for people.
    """

    launch: Launch
    on_cpu: Launch | None
    answers: Callable[[], Awaitable[bool]]
    device_lost: Callable[[], str | None] = lambda: None
    talk: Callable[[str], None] = lambda sentence: None
    log: Callable[[bytes], None] = lambda line: None
    patience: Patience = PATIENCE
    heard: Callable[[], bool] = lambda: False
    state: State = field(default_factory=State)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._ran = False  # there was a process at the last start
        self._exit: asyncio.Task[int] | None = None  # once for each start: wait() keeps what was cancelled
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._stopped = asyncio.Event()
        self.state.on_device = self.launch.uses_device

    async def run(self) -> None:
        """Until it is cancelled; the program has ended then. Raises DeviceError where it does not start at all, or
        fails to start again and again."""
        try:
            await self._run()
        finally:
            self._not_ready("ended")
            await self._end()

    async def _run(self) -> None:
        n_failures, was_ready = 0, False
        while True:
            if not self._wanted.is_set():
                self._not_ready("stopped")
                self._stopped.set()
                await self._wanted.wait()
                self._stopped.clear()
                n_failures = 0
            why = await self._start()
            if why is None:
                was_ready, begun = True, time.monotonic()
                why = await self._watch()
                started = True
                if time.monotonic() - begun > self.patience.steady_s:
                    n_failures = 0
            else:
                started = False
            on_purpose = not self._wanted.is_set()
            self._not_ready("waiting")
            await self._end()
            if on_purpose:
                continue
            if not was_ready:
                raise DeviceError(f"llama-server does not start: {why}")
            n_failures += 1
            self.state.restarts += 1
            lost = self.device_lost() if self.launch.uses_device else None
            if self.on_cpu is not None and self.launch.uses_device and (lost or (self._ran and not started)):
                self._go_on_without(lost or why)
                n_failures = 0
                continue
            if n_failures >= self.patience.n_starts and not started:
                raise DeviceError(f"llama-server fails to start again and again, at last: {why}")
            pause_s = self.patience.backoff_s(n_failures)
            self.state.said = f"llama-server ended: {why}; it starts again"
            self.talk(f"llama-server ended: {why}; starting it again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)

    def _go_on_without(self, why: str) -> None:
        assert self.on_cpu is not None
        self.launch = self.on_cpu
        self.state.on_device, self.state.device_lost = False, True
        self.state.said = f"the device was lost ({why}); the CPU computes everything until oallama is started again"
        self.talk(f"the device was lost ({why}); starting again on the CPU alone, which is slower")

    async def pause(self) -> None:
        """End the program until `resume`."""
        self._wanted.clear()
        self.ready.clear()
        await self._end()
        await self._stopped.wait()

    def resume(self, launch: Launch | None = None) -> None:
        """Start it again, in another way where one is given."""
        if launch is not None:
            self.launch = launch
            self.state.on_device, self.state.said = launch.uses_device, None
        self._wanted.set()

    async def started(self) -> None:
        """Until it is ready, or its start has failed."""
        while not self.ready.is_set() and self.state.phase in ("stopped", "starting"):
            waiting = asyncio.ensure_future(self.ready.wait())
            await asyncio.wait({waiting}, timeout=self.patience.look_s)
            waiting.cancel()

    async def _start(self) -> str | None:
        """Start it and wait until it answers. Returns why it did not."""
        self._not_ready("starting")
        self._tail.clear()
        self._ran = False
        try:
            self.launch.prepare()
            command, environment = with_us(self.launch.command, self.launch.environment)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C comes to us
                limit=LINE_BYTES,
            )
        except OSError as error:  # no more processes, or no memory, for now
            return f"it cannot be started: {error.strerror or error}"
        self._ran = True
        self.state.pid = self._process.pid
        self._exit = asyncio.create_task(self._process.wait())
        self._reader = asyncio.create_task(self._read(self._process))
        deadline = time.monotonic() + self.patience.start_s
        while time.monotonic() < deadline:
            answers = await self.answers()
            if not self._wanted.is_set():
                return STOPPED
            if answers and self._process.returncode is None:
                self.state.phase, self.state.ready_at = "ready", time.time()
                self.ready.set()
                return None
            if await self._ended_within(min(0.1, self.patience.look_s)):
                return await self._how_it_ended()
        return f"it does not answer after {self.patience.start_s:.0f} s"

    async def _watch(self) -> str:
        """Until it ends, or its device is gone, or it answers nobody, or is not wanted. Returns why."""
        answered = time.monotonic()
        while self._wanted.is_set():
            if await self._ended_within(self.patience.look_s):
                return await self._how_it_ended()
            if self.launch.uses_device and (lost := self.device_lost()):
                return lost
            if self.heard() or await self.answers():
                answered = time.monotonic()
            elif time.monotonic() - answered > self.patience.answer_s:
                return f"it has answered nobody for {self.patience.answer_s:.0f} s"
        return STOPPED

    async def _ended_within(self, seconds: float | None) -> bool:
        assert self._process is not None and self._exit is not None
        await asyncio.wait({self._exit}, timeout=seconds)  # wait_for would lose a cancellation that comes with the end
        return self._process.returncode is not None

    async def _how_it_ended(self) -> str:
        assert self._process is not None and self._process.returncode is not None
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        words = last_words(self._tail)
        return f"{how}: {words}" if words else how

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Keep its last lines. A line that is too long is cut."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                line = end.partial
            except asyncio.LimitOverrunError as overrun:
                line = await process.stdout.readexactly(overrun.consumed)
            if not line:
                return
            self._tail.append(line.decode(errors="replace").rstrip())
            self.log(line)

    def _not_ready(self, phase: Phase) -> None:
        self.ready.clear()
        self.state.phase, self.state.ready_at = phase, None

    async def _end(self) -> None:
        """SIGTERM, and SIGKILL where that is not enough."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            if not await self._ended_within(self.patience.end_s):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await self._ended_within(None)
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()
        self.state.pid = None


def last_words(lines: Sequence[str]) -> str:
    """The last line that speaks of an error, else the last one; cut to what a sentence can hold."""
    written = [line for line in lines if line.strip()]
    telling = [
        line for line in written if any(word in line.lower() for word in ("error", "failed", "abort", "crashed"))
    ]
    chosen = (telling or written or [""])[-1].strip()
    return chosen if len(chosen) <= 300 else chosen[:299] + "…"
