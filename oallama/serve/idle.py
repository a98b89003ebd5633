"""Measuring when no request has come for a while: how long that is, and what a request does that comes meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from oallama.serve.access import PUBLIC
from oallama.serve.supervisor import Supervisor
from oallama.serve.tuning import Tuning

WATCHING = (*PUBLIC, "/metrics", "/slots", "/props")
"""What programs ask again and again that only look at the server; /placement and what is below it too."""


class Idle:
    """An ASGI application around another: counts requests for the model, and has llama-server there for them.

    One that comes while it is measured what gives way ends that, and waits until the model is loaded again.
    """

    def __init__(
        self, app: ASGIApp, supervisor: Supervisor, tuning: Tuning, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._supervisor, self._tuning, self._clock = app, supervisor, tuning, clock
        self._n_requests = 0
        self._since = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _watches(scope["path"]):
            if scope["type"] == "http" and scope["path"] in PUBLIC and self._tuning.gives_way:
                await JSONResponse({"status": "ok"})(scope, receive, send)  # a request would be answered
                return
            await self._app(scope, receive, send)
            return
        self._n_requests += 1
        try:
            await self._tuning.make_way()
            await self._app(scope, receive, send)
        finally:
            self._n_requests -= 1
            self._since = self._clock()

    async def quiet(self, seconds: float) -> None:
        """Until llama-server has been ready, and asked for nothing, for so long."""
        while True:
            if not self._supervisor.ready.is_set():
                await self._supervisor.ready.wait()
                self._since = self._clock()
            left = seconds if self._n_requests else seconds - (self._clock() - self._since)
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def tune(self, seconds: float) -> None:
        """Measure as soon as it was quiet for so long, and twice as long after each time that a request came meanwhile:
        loading the model again and again would cost more than a better placement gives."""
        while not self._tuning.succeeded:
            await self.quiet(seconds)
            why = f"no request for {seconds:g} s: measuring which placement is faster; a request ends it at once"
            if self._tuning.begin(why) is not None or not await self._tuning.gave_way():
                return
            seconds *= 2


def _watches(path: str) -> bool:
    return path in WATCHING or path == "/placement" or path.startswith(("/placement/", "/placement."))
