"""Errors as OpenAI's API has them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import JSONResponse

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error", 409: "conflict_error",
    413: "invalid_request_error", 503: "unavailable_error",
}  # fmt: skip


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """What a client library turns into its exception."""
    return JSONResponse(error_body(status, message), status, headers)


def error_body(status: int, message: str) -> dict[str, object]:
    """The JSON of error_response."""
    return {"error": {"message": message, "type": TYPES.get(status, "server_error"), "param": None, "code": status}}


def error_event(message: str) -> bytes:
    """The last event of a stream that cannot go on."""
    return f"event: error\ndata: {json.dumps({'type': 'error', **error_body(503, message)})}\n\n".encode()
