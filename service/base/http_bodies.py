"""Bodies over HTTP, for every server of the service: a request's, read within limits, and an error's.

An error is {"error": {"code", "message", "hint"}}.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import IO

import structlog
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...compiler.api import compiles
from ...compiler.errors import (
    LimitExceeded,
    MalformedRequest,
    NotFound,
    Overloaded,
    RelayError,
    RequestError,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from ...compiler.request import codec
from .budgets import HELD, Held

log = structlog.get_logger(__name__)

_BODY_UNREAD = frozenset({401, 403, 413, 415})
"""Sent before the body is read. The connection is closed, so that the server need not read the body."""
_RETRY_STATUSES = frozenset({429, 503})
_DRAIN_SECONDS = 2.0
_WRITE_BYTES = 1 << 20
_SLOWEST = 256 << 10
"""Bytes a second: a large body that arrives more slowly is refused."""


class ErrorReply(Struct, frozen=True):
    """The body of every answer that is not 2xx."""

    error: compiles.ErrorBody


def relay_error(error: Exception, path: str, *, hint: str = "") -> RelayError:
    """What any exception is answered with that leaves a handler. One that nobody expects is logged. hint: for whoever
    sent a wrong request."""
    match error:
        case RelayError():
            return error
        case HTTPException(status_code=404):
            return NotFound(f"there is no {path}", hint=hint)
        case HTTPException():
            return RequestError(str(error.detail), hint=hint)
        case ClientDisconnect():  # nobody gets this answer
            return MalformedRequest("the client disconnected before its body had arrived")
    log.error("request_broke", path=path, exc_info=error)
    return ServiceError(f"the service failed with {type(error).__name__}", hint="Its log says more")


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


class UploadedFile(Struct, frozen=True):
    """A body on disk, of which a slice is read when it is asked for. digest: its SHA-256, in hexadecimal."""

    file: IO[bytes]
    size: int
    digest: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice, /) -> bytes:
        """Raises OSError."""
        start, stop, _ = part.indices(self.size)
        return os.pread(self.file.fileno(), max(0, stop - start), start)


async def read_body(request: Request, limit: int, *, seconds: float) -> bytes:
    """The body; never more than `limit` bytes are in memory. It must arrive within `seconds`; a large declared size
    gets more. Raises LimitExceeded, MalformedRequest; Overloaded if the process has no memory for it now."""
    parts: list[bytes] = []
    held: Held | None = request.scope.get(HELD)

    async def take(part: bytes) -> None:
        if held is not None:
            held.body(len(part))
        parts.append(part)

    await _receive(request, limit, seconds, take)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def body_in_file(request: Request, limit: int, *, seconds: float) -> AsyncGenerator[UploadedFile]:
    """The same as `read_body`, but in a file without a name in the folder for temporary files, for bodies that are too
    large for memory. Raises Unavailable too, if the disk does not take it."""
    parts: list[bytes] = []
    unwritten = 0
    held: Held | None = request.scope.get(HELD)

    with _temporary_file() as file:
        hashed = hashlib.sha256()

        def write() -> None:
            for part in parts:
                hashed.update(part)
                file.write(part)
            parts.clear()

        async def take(part: bytes) -> None:
            nonlocal unwritten
            if held is not None:
                held.upload(len(part))
            parts.append(part)
            unwritten += len(part)
            if unwritten >= _WRITE_BYTES:
                unwritten = 0
                await asyncio.to_thread(write)

        try:
            await _receive(request, limit, seconds, take)
            await asyncio.to_thread(write)
            size = file.tell()
            file.seek(0)
        except OSError as error:
            await _drain(request, limit)
            raise _no_room(error) from error
        yield UploadedFile(file, size, hashed.hexdigest())


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> Unavailable:
    return Unavailable(f"the body could not be written to {tempfile.gettempdir()}: {error.strerror}")


async def _receive(
    request: Request, limit: int, seconds: float, take: Callable[[bytes], Awaitable[None]]
) -> None:
    """Gives `take` the body's parts. Raises as `read_body`."""
    declared = declared_bytes(request)
    if declared is not None and declared > limit:
        await _drain(request, limit)
        raise LimitExceeded(f"body has {declared} bytes, limit {limit}")
    size = 0
    seconds = max(seconds, (declared or 0) / _SLOWEST)
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    break
                if part:
                    await take(part)
    except Overloaded:
        await _drain(request, limit)
        raise
    except TimeoutError:
        raise MalformedRequest(f"the body did not arrive within {seconds:g} s") from None
    if size > limit:
        await _drain(request, limit)
        raise LimitExceeded(f"body has more than {limit} bytes")


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
