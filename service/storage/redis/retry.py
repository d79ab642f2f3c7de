"""A Redis that is away for a while: a call in; its answer, once there is one, out. For work that can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = structlog.get_logger(__name__)

T = TypeVar("T")

REDIS_OUTAGES = (RedisConnectionError, RedisTimeoutError, ReadOnlyError)
"""What a Redis that restarts or fails over answers: worth waiting for. Any other answer stays the same."""
_RETRY_SECONDS = 0.5


async def retry_while_down(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` returns, once Redis is back if it is away."""
    while True:
        try:
            return await call()
        except REDIS_OUTAGES as error:
            log.warning("redis_waited_for", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
