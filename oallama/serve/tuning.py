"""`POST /placement/tune`, and measuring when idle: llama-server makes room for `oallama tune`, and starts again with
what won."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oallama.core.errors import OallamaError
from oallama.report.placement import Served
from oallama.serve.launch import with_us
from oallama.serve.supervisor import Launch, Supervisor

END_S = 5.0  # that it gets to keep what it has measured
ASKED = "measuring which placement is faster, as /placement/tune asks; requests wait for the end of it"


@dataclass(frozen=True, slots=True)
class Tune:
    """command: measures, and ends with exit code 0 where it did. replan: what is to be served then, None where what was
    measured does not settle it; it may raise an OallamaError. idle_s: without a request, after which it is done by
    itself; None: only where it is asked for."""

    command: tuple[str, ...]
    replan: Callable[[], Served | None]
    idle_s: float | None = None


class Tuning:
    """Done at most once at a time. launch: how a placement is started; take: called with what is served next."""

    def __init__(
        self,
        tune: Tune,
        supervisor: Supervisor,
        launch: Callable[[Served], Launch],
        take: Callable[[Served], None],
        talk: Callable[[str], None],
    ) -> None:
        self._tune, self._supervisor, self._launch, self._take, self._talk = tune, supervisor, launch, take, talk
        self._task: asyncio.Task[None] | None = None
        self._idle = False  # what is being measured is measured because nobody asks anything
        self._wanted = asyncio.Event()  # a request has come
        self._is_open = False  # what was measured settles nothing yet
        self.succeeded = False

    def begin(self, idle: str | None = None) -> str | None:
        """Begin to measure, unless that is being done; or why not. idle: what to say of it where nobody asked for it,
        so that it gives way to requests; None: they are refused meanwhile."""
        if self._supervisor.state.device_lost:
            return "the device was lost; start oallama again to measure with it"
        if self._task is None or self._task.done():
            self._idle = idle is not None
            self._wanted.clear()
            self._is_open = False
            self._task = asyncio.create_task(self._measure(idle or ASKED))
        elif idle is None:
            self._idle = False
        return None

    @property
    def gives_way(self) -> bool:
        """Whether something is being measured that ends when a request comes."""
        return self._idle and self._task is not None and not self._task.done()

    async def make_way(self) -> None:
        """End what gives way, and wait until llama-server answers again, or has failed to start."""
        if self.gives_way:
            assert self._task is not None
            self._wanted.set()
            await asyncio.wait({self._task})
            await self._supervisor.started()

    async def is_to_go_on(self) -> bool:
        """Whether what is being measured, once it has ended, did so for a request, or settles nothing."""
        if self._task is not None:
            await asyncio.wait({self._task})
        return (self._wanted.is_set() or self._is_open) and not self.succeeded

    async def end(self) -> None:
        """Give up what is being measured."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _measure(self, why: str) -> None:
        supervisor = self._supervisor
        if self._wanted.is_set():
            return
        self._talk(why)
        await supervisor.pause()
        supervisor.state.said = "it is being measured which placement is faster, for some minutes at most"
        launch = None
        try:
            code = await _run(self._tune.command, self._wanted)
            if code is None:
                self._talk("a request came, so measuring has ended; what was measured is kept")
            elif code:
                self._talk(f"oallama tune ended with exit code {code}; the placement stays as it was")
            elif (served := await asyncio.to_thread(self._tune.replan)) is None:
                self._is_open = True
                self._talk(
                    "nothing has won yet, as what was measured does not settle it; the placement stays as it was"
                )
            else:
                launch = self._launch(served)
                self._take(served)
                self.succeeded = True
        except (OallamaError, OSError) as error:
            self._talk(f"the placement stays as it was: {error}")
        finally:
            supervisor.state.said = None
            supervisor.resume(launch)


async def _run(command: Sequence[str], wanted: asyncio.Event) -> int | None:
    """A command in a process that ends with us and talks where we do. Returns its exit code; None where it was ended,
    as something else was wanted meanwhile."""
    if wanted.is_set():
        return None
    words, environment = with_us(command, os.environ)
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    ended, asked = asyncio.ensure_future(process.wait()), asyncio.ensure_future(wanted.wait())
    try:
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        return process.returncode
    finally:
        asked.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # it keeps what it has measured
            await asyncio.wait({ended}, timeout=END_S)
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await ended
