"""Decodes a small JSON body into a checked struct. Never more than the limit is in memory."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import Request

from ....compiler import decoding
from ....compiler.errors import LimitExceeded, MalformedRequest

_BYTES = 4096

T = TypeVar("T")


async def read_json(request: Request, type: type[T], *, limit: int = _BYTES) -> T:
    """At most `limit` bytes. Raises LimitExceeded, MalformedRequest."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise LimitExceeded(f"this body has at most {limit} bytes")
    return decode_json(body, type)


def decode_json(body: bytes | bytearray, type: type[T]) -> T:
    """Raises MalformedRequest."""
    try:
        return decoding.from_json(body, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedRequest(f"not a {type.__name__}: {error}", hint="See /docs") from None
