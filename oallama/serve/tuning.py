"""`POST /placement/tune`: llama-server makes room for `oallama tune`, and starts again with what won."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from oallama.core.errors import OallamaError
from oallama.report.placement import Served
from oallama.serve.launch import with_us
from oallama.serve.supervisor import Launch, Supervisor

END_S = 5.0  # that it gets to keep what it has measured


@dataclass(frozen=True, slots=True)
class Tune:
    """arguments: of `oallama tune`. replan: what is to be served then; it may raise an OallamaError."""

    arguments: tuple[str, ...]
    replan: Callable[[], Served]


class Tuning:
    """Done at most once at a time. begin: how a placement is started; take: called with the one that is served next."""

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

    def begin(self) -> str | None:
        """Begin to measure, unless that is being done; or why not."""
        if self._supervisor.state.device_lost:
            return "the device was lost; start oallama again to measure with it"
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._measure())
        return None

    async def end(self) -> None:
        """Give up what is being measured."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _measure(self) -> None:
        supervisor = self._supervisor
        self._talk("measuring which placement is faster, as /placement/tune asks; requests wait for the end of it")
        await supervisor.pause()
        supervisor.state.said = "it is being measured which placement is faster, for some minutes at most"
        served = None
        try:
            code = await _run("tune", *self._tune.arguments)
            if code:
                self._talk(f"oallama tune ended with exit code {code}; the placement stays as it was")
            else:
                served = await asyncio.to_thread(self._tune.replan)
        except OallamaError as error:
            self._talk(f"the placement stays as it was: {error}")
        finally:
            supervisor.state.said = None
            if served is not None:
                self._take(served)
            supervisor.resume(None if served is None else self._launch(served))


async def _run(*arguments: str) -> int:
    """A command of oallama, in a process that ends with us and talks where we do. Returns its exit code."""
    command, environment = with_us([sys.executable, "-m", "oallama", *arguments], os.environ)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # it keeps what it has measured
            waiting = asyncio.ensure_future(process.wait())
            await asyncio.wait({waiting}, timeout=END_S)
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await waiting
