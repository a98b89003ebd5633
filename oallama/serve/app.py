"""The application on the server's port: llama-server's whole API passed through, and the placement beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from oallama.report.placement import Served, page_policy, placement_document, placement_html
from oallama.serve.errors import error_response
from oallama.serve.live import Live, live_of
from oallama.serve.proxy import PassedOn, Proxy
from oallama.serve.supervisor import Supervisor
from oallama.serve.tuning import Tuning

METRICS_S = 2.0  # that llama-server may take to tell
KEPT_S = 1.0  # that what it told is told again
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
NOT_STORED = {"Cache-Control": "no-store"}


def application(
    supervisor: Supervisor, proxy: Proxy, served: Callable[[], Served], tuning: Tuning | None = None
) -> Starlette:
    """served: what is served now. tuning: None where there is nothing to measure."""
    live = LiveNumbers(proxy)

    async def placement(request: Request) -> Response:
        measured = await live.now() if supervisor.ready.is_set() else None
        known = None if measured is None else asdict(measured)
        return JSONResponse(placement_document(served(), asdict(supervisor.state), known), headers=NOT_STORED)

    async def page(request: Request) -> Response:
        headers = {
            **NOT_STORED,
            "Content-Security-Policy": page_policy(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(placement_html(served()), headers=headers)

    async def tune(request: Request) -> Response:
        if tuning is None:
            return error_response(409, "there is nothing to measure: the placement was asked for, or has no device")
        if (refused := tuning.begin()) is not None:
            return error_response(409, refused)
        return JSONResponse({"state": "measuring", "placement": "/placement"}, 202)

    async def others(request: Request) -> Response:
        if not supervisor.ready.is_set():
            return error_response(503, why_not(supervisor), {"Retry-After": "2"})
        answer = await proxy(request)
        if request.url.path == "/" and request.method == "GET" and answer.status_code == 404:
            if isinstance(answer, PassedOn):
                answer.close()
            return RedirectResponse("placement.html")  # llama-server was built without its own page
        return answer

    return Starlette(
        routes=[
            Route("/placement", placement, methods=["GET"]),
            Route("/placement.html", page, methods=["GET"]),
            Route("/placement/tune", tune, methods=["POST"]),
            Route("/{path:path}", others, methods=METHODS),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _fault},
    )


class LiveNumbers:
    """What llama-server measured, asked at most once in KEPT_S, however many pages are open."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._lock = asyncio.Lock()
        self._known: Live | None = None
        self._at = float("-inf")

    async def now(self) -> Live | None:
        """None where it does not tell."""
        async with self._lock:
            if time.monotonic() - self._at > KEPT_S:
                answer = await self._proxy.get("/metrics", METRICS_S)
                status, body = answer or (503, b"")
                self._known = live_of(body.decode(errors="replace")) if status == 200 else None
                self._at = time.monotonic()
            return self._known


def why_not(supervisor: Supervisor) -> str:
    """For clients, while nothing answers."""
    state = supervisor.state
    if state.phase == "starting":
        return "the model is being loaded" if state.said is None else f"the model is being loaded again: {state.said}"
    return state.said or "llama-server ended; it is being started again"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return error_response(500, "the server met a fault of its own; its log says which")


def answers(proxy: Proxy, timeout_s: float = 2.0) -> Callable[[], Any]:
    """Whether llama-server has loaded its model and answers now."""

    async def asked() -> bool:
        answer = await proxy.get("/health", timeout_s)
        return answer is not None and answer[0] == 200

    return asked
