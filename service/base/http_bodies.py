"""Bodies over HTTP, for every server of the service: a request's, read within limits, and an error's.

An error is {"error": {"code", "message", "hint"}}.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...compiler.api import compiles
from ...compiler.errors import LimitExceeded, MalformedRequest, RelayError, Unauthenticated
from ...compiler.request import codec

_BODY_UNREAD = frozenset({401, 403, 413, 415})
"""Sent before the body is read. The connection is closed, so that the server need not read the body."""
_RETRY_STATUSES = frozenset({429, 503})
_DRAIN_SECONDS = 2.0
_SLOWEST = 256 << 10
"""Bytes a second: a large body that arrives more slowly is refused."""


class ErrorReply(Struct, frozen=True):
    """The body of every answer that is not 2xx."""

    error: compiles.ErrorBody


def reply(error: RelayError, *, retry_after_seconds: int, status: int | None = None) -> Response:
    headers = {"Cache-Control": "no-store"}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if (status or error.status) in _BODY_UNREAD:
        headers["Connection"] = "close"
    if error.status in _RETRY_STATUSES:
        headers["Retry-After"] = str(error.retry_after or retry_after_seconds)
    body = codec.to_json(ErrorReply(compiles.ErrorBody(error.code, error.message, error.advice)))
    return Response(body, status or error.status, headers, "application/json")


def declared_bytes(request: Request) -> int | None:
    """The size that a body's sender declares, if he does."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else None


async def read_body(request: Request, limit: int, *, seconds: float) -> bytes:
    """The body; never more than `limit` bytes are in memory. It must arrive within `seconds`; a large declared size
    gets more. Raises LimitExceeded, MalformedRequest."""
    declared = declared_bytes(request)
    if declared is not None and declared > limit:
        await _drain(request, limit)
        raise LimitExceeded(f"body has {declared} bytes, limit {limit}")
    parts: list[bytes] = []
    size = 0
    seconds = max(seconds, (declared or 0) / _SLOWEST)
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
    except TimeoutError:
        raise MalformedRequest(f"the body did not arrive within {seconds:g} s") from None
    if size > limit:
        await _drain(request, limit)
        raise LimitExceeded(f"body has more than {limit} bytes")
    return b"".join(parts)


async def _drain(request: Request, limit: int) -> None:
    """Reads and drops the rest for a short time: a client that still sends would miss the answer."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    return
    except TimeoutError:
        return
