"""What to do when Redis is down: repeat the call, for work that can wait, or log the error, for work that can fail."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = structlog.get_logger(__name__)

T = TypeVar("T")

REDIS_OUTAGES = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)
"""Errors of a Redis that restarts or fails over, which pass. Any other error would stay the same."""
_RETRY_SECONDS = 0.5


async def retry_while_down(
    call: Callable[[], Awaitable[T]],
    *,
    seconds: float = math.inf,
    longest_pause: float = _RETRY_SECONDS,
    errors: tuple[type[Exception], ...] = REDIS_OUTAGES,
) -> T:
    """What `call` returns, once it raises none of `errors`. The pause between two tries doubles up to `longest_pause`.
    Raises the last error after `seconds`."""
    until = time.monotonic() + seconds
    pause = _RETRY_SECONDS
    while True:
        try:
            return await call()
        except errors as error:
            left = until - time.monotonic()
            if left <= 0:
                raise
            log.warning("call_delayed", error=f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(max(_RETRY_SECONDS, min(pause, left)))
            pause = min(2 * pause, longest_pause)


@contextmanager
def redis_errors_logged(event: str, **fields: Any) -> Iterator[None]:
    """Logs `event` if Redis fails inside, and goes on."""
    try:
        yield
    except RedisError as error:
        log.warning(event, error=str(error), **fields)
