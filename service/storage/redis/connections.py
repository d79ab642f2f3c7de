"""The gateway's connections to Redis, given out in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from ...base.settings import ServiceSettings
from .retry import REDIS_OUTAGES

_for_leases = ContextVar("_for_leases", default=False)


@contextlib.contextmanager
def reserved_for_leases() -> Iterator[None]:
    """Inside, a connection is one of those reserved for leases, so that no lease expires behind a thousand requests."""
    token = _for_leases.set(True)
    try:
        yield
    finally:
        _for_leases.reset(token)


class FairConnectionPool(BlockingConnectionPool):
    """A pool that gives connections in the order of the calls. With redis-py's own, another caller can take a free
    connection before the waiter that was woken for it, which then waits again behind all others: in a burst of
    a thousand requests some waited past `timeout` while Redis answered all the time.

    `for_leases` of the `max_connections` are for calls inside `reserved_for_leases`.
    """

    def __init__(self, *arguments: Any, for_leases: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turns = asyncio.Semaphore(self.max_connections - for_leases)
        self._lease_turns = asyncio.Semaphore(for_leases)
        self._given: dict[int, asyncio.Semaphore] = {}
        """By the id of each connection in use: what to give its turn back to."""

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Raises redis.exceptions.ConnectionError after `timeout` seconds without one, or if Redis is away."""
        turns = self._lease_turns if _for_leases.get() else self._turns
        try:
            async with asyncio.timeout(self.timeout):
                await turns.acquire()
        except TimeoutError:
            raise RedisConnectionError("No connection available.") from None
        try:
            connection = await super().get_connection(*arguments, **options)
        except BaseException:
            turns.release()
            raise
        self._given[id(connection)] = turns
        return connection

    async def release(self, connection: Any) -> None:
        try:
            await super().release(connection)
        finally:  # one that could not be made is not there: its turn has been given back
            if (turns := self._given.pop(id(connection), None)) is not None:
                turns.release()


_REDIS_CONNECTIONS = 64
_LEASE_CONNECTIONS = 4
_REDIS_RETRIES = 3
_QUEUE_TIMES = 3


def connect(settings: ServiceSettings) -> Redis:
    """A client that reconnects by itself. It waits at most `redis_timeout_seconds` for an answer, and three times that
    for a free connection: a burst waits its turn."""
    # redis-py before 6 takes a certificate for any name unless told otherwise
    tls = {"ssl_check_hostname": True} if settings.redis_url.startswith("rediss:") else {}
    pool = FairConnectionPool.from_url(
        settings.redis_url,
        **tls,
        max_connections=_REDIS_CONNECTIONS,
        for_leases=_LEASE_CONNECTIONS,
        timeout=_QUEUE_TIMES * settings.redis_timeout_seconds,
        socket_timeout=settings.redis_timeout_seconds,
        socket_connect_timeout=settings.redis_timeout_seconds,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), _REDIS_RETRIES),
        # also of a primary that became a replica: its name leads to the new one
        retry_on_error=list(REDIS_OUTAGES),
    )
    return Redis.from_pool(pool)
