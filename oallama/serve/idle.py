"""Measuring when no request has come for a while: how long that is, and what a request does that comes meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from oallama.serve.access import PUBLIC, host_name, is_local
from oallama.serve.supervisor import Supervisor
from oallama.serve.tuning import Tuning

WATCHING = (*PUBLIC, "/metrics", "/slots", "/props")
"""What programs ask again and again that only look at the server; /placement and what is below it too, and OPTIONS."""


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _watches(scope["method"], scope["path"]):
            await self._for_watchers(scope)(scope, receive, send)
            return
        self._n_requests += 1
        try:
            await self._tuning.make_way()
            await self._app(scope, receive, send)
        finally:
            self._n_requests -= 1
            self._since = self._clock()

    def _for_watchers(self, scope: Scope) -> ASGIApp:
        """What answers one that only looks: we, as for a server that is up, where a request would have llama-server
        back."""
        if self._tuning.gives_way and scope["method"] == "OPTIONS":
            return preflight(Headers(scope=scope))
        if self._tuning.gives_way and scope["path"] in PUBLIC:
            return JSONResponse({"status": "ok"})
        return self._app

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
        """Measure as soon as it was quiet for so long, and twice as long after each time that a request ended it or
        nothing was settled: loading the model again and again would cost more than a better placement gives."""
        while not self._tuning.succeeded:
            await self.quiet(seconds)
            why = f"no request for {seconds:g} s: measuring which placement is faster; a request ends it at once"
            if self._tuning.begin(why) is not None or not await self._tuning.is_to_go_on():
                return
            seconds *= 2


def _watches(method: str, path: str) -> bool:
    of_placement = path == "/placement" or path.startswith(("/placement/", "/placement."))
    return method == "OPTIONS" or path in WATCHING or of_placement


def preflight(headers: Headers) -> Response:
    """What a browser asks before it sends a page's request, answered as llama-server does: pages of this machine may
    ask."""
    origin = headers.get("origin", "")
    if not is_local(host_name(origin.partition("://")[2])):
        return Response(status_code=204)
    allowed = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Credentials": "true",
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
    }
    return Response(status_code=204, headers=allowed)
