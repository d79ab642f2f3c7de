"""Errors over HTTP: every failure, also the framework's own, as {"error": {"code", "message", "hint"}}."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ....compiler.errors import MalformedRequest, RelayError, Unavailable
from ...base.http_bodies import relay_error, reply
from ...storage.redis.retry import write_refusal
from .page_bodies import error_page, is_page, wants_page

log = structlog.get_logger(__name__)

_READ_ONLY = "Hits go on. For a miss, see to Redis or its failover, or compile locally meanwhile"
_SCHEMA = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}
_TEXTS = {
    400: "The request cannot be read",
    401: "No token, or one that is not known",
    403: "The token lacks the role, or may not send source",
    404: "Not found",
    413: "Over a limit",
    415: "Another content type",
    422: "The request is invalid; the same request fails again",
    426: "The client is too old for this gateway",
    429: "Too many compiles, over a quota, or too many requests; Retry-After says when to send it again",
    503: "Redis, the workers or the blob store cannot be reached; Retry-After says when to send it again",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: these errors, and the ones that every authenticated route has."""
    return {
        status: {"description": _TEXTS[status], "content": _SCHEMA}
        for status in sorted({401, 403, 404, 422, 426, 429, 503, *statuses})
    }


def install(app: FastAPI, *, retry_after_seconds: int) -> None:
    """Answer every exception that leaves a route, and the framework's, with an ErrorReply."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(request, error, retry_after_seconds)

    kinds = (RelayError, RedisError, RequestValidationError, HTTPException, ClientDisconnect, Exception)
    for kind in kinds:
        app.add_exception_handler(kind, answer)


def error_response(request: Request, error: Exception, retry_after_seconds: int) -> Response:
    """What a request is answered whose handler raised `error`."""
    status = error.status_code if isinstance(error, HTTPException) else None
    told = _relay_error(request, error)
    response = reply(told, retry_after_seconds=retry_after_seconds, status=status)
    headers = dict((error.headers or {}) if isinstance(error, HTTPException) else {})
    if is_page(request) and wants_page(request):
        headers |= {name: response.headers[name] for name in ("Retry-After",) if name in response.headers}
        response = error_page(request, told, response.status_code)
    response.headers.update(headers)
    return response


def _relay_error(request: Request, error: Exception) -> RelayError:
    path = request.url.path
    match error:
        case RedisError():
            log.error("redis_error", path=path, error=str(error))
            if refusal := write_refusal(error):
                return Unavailable(f"Redis takes no writes: {refusal}", hint=_READ_ONLY)
            return Unavailable("Redis cannot be reached")
        case RequestValidationError():
            found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return MalformedRequest(found, hint="See /docs")
    return relay_error(error, path, hint="See /docs")
