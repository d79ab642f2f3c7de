"""Calls of Redis that are repeated while it is down, for work that can wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = structlog.get_logger(__name__)

T = TypeVar("T")

REDIS_OUTAGES = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)
"""Errors of a Redis that restarts or fails over, which pass. Any other error would stay the same."""
_RETRY_SECONDS = 0.5


async def retry_while_down(call: Callable[[], Awaitable[T]], *, seconds: float = math.inf) -> T:
    """What `call` returns, once Redis is back if it is down. Raises its error after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except REDIS_OUTAGES as error:
            if time.monotonic() > until:
                raise
            log.warning("redis_waited_for", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
