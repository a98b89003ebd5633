"""Measuring while nobody types into a chat: `oallama tune` in a process of its own, which the next key ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence

from oallama.serve.launch import with_us

POLL_S = 0.2  # between looks at whether it has ended
END_S = 5.0  # that it gets to keep what it has measured


class IdleTune:
    """command: measures, and ends with exit code 0 where it did. seconds: without a key, before it begins; twice as
    many after each time that a key ended it. make_room: frees what it needs. wanted: until it has ended by itself."""

    def __init__(self, command: Sequence[str], seconds: float, make_room: Callable[[], None]) -> None:
        self._command, self._make_room = command, make_room
        self.seconds = seconds
        self.wanted = True
        self._process: subprocess.Popen[bytes] | None = None

    async def watch(self, pressed: asyncio.Event, say: Callable[[str], Awaitable[None]]) -> None:
        """Over one prompt. pressed: set at each key."""
        while self.wanted:
            pressed.clear()
            if await _set_within(pressed, self.seconds):
                continue
            self.end()
            await say(
                f"no input for {self.seconds:g} s: measuring which placement is faster; any key ends it and keeps "
                "what is done"
            )
            if pressed.is_set():
                continue
            self._make_room()
            words, environment = with_us(self._command, os.environ)
            nowhere = subprocess.DEVNULL  # somebody may be about to type
            self._process = subprocess.Popen(
                words, stdin=nowhere, stdout=nowhere, stderr=nowhere, env=environment, start_new_session=True
            )
            while self._process.poll() is None and not pressed.is_set():
                await _set_within(pressed, POLL_S)
            if self._process.poll() is None:
                self._interrupt(self._process)
                self.seconds *= 2
                continue
            self.wanted = False
            code = self._process.returncode
            failed = f"measuring has failed with exit code {code}; `oallama tune` says why"
            await say("measuring has ended; the next message is answered with what won" if code == 0 else failed)

    def go_on(self) -> None:
        """Measure again in a later pause, as what was measured settles nothing."""
        self.wanted = True
        self.seconds *= 2

    def end(self) -> bool:
        """End what is being measured; whether it had ended by itself since the last call, and something was found."""
        process, self._process = self._process, None
        if process is None:
            return False
        self._interrupt(process)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode == 0:
            self.wanted = False
        return process.returncode == 0

    def _interrupt(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # it keeps what it has measured


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)  # wait_for would lose a cancellation that comes with the key
    finally:
        waiting.cancel()
    return event.is_set()
