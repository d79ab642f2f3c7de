"""The gateway's connections to Redis: who asks in, a free connection out, in the order in which they asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

_keeping = ContextVar("_keeping", default=False)


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Inside, a connection is one of those for leases: no lease runs out because a thousand requests ask first."""
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


class ConnectionsInTurn(BlockingConnectionPool):
    """redis-py's own gives a free connection to whoever comes next, and who was woken for it waits anew, behind all
    others: in a burst of a thousand requests some waited past `timeout` while Redis answered all the time.

    `for_leases` of the `max_connections` are for who asks inside `keeping`.
    """

    def __init__(self, *arguments: Any, for_leases: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turns = asyncio.Semaphore(self.max_connections - for_leases)
        self._lease_turns = asyncio.Semaphore(for_leases)
        self._given: dict[int, asyncio.Semaphore] = {}
        """By the id of each connection in use: what to give its turn back to."""

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Raises redis.exceptions.ConnectionError after `timeout` seconds without one, or if Redis is away."""
        turns = self._lease_turns if _keeping.get() else self._turns
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
