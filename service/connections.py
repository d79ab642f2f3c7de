"""The gateway's connections to Redis: who asks in, a free connection out, in the order in which they asked."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError


class ConnectionsInTurn(BlockingConnectionPool):
    """redis-py's own gives a free connection to whoever comes next, and who was woken for it waits anew, behind all
    others: in a burst of a thousand requests some waited past `timeout` while Redis answered all the time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turns = asyncio.Semaphore(self.max_connections)
        self._given: set[int] = set()
        """Ids of the connections that are in use."""

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Raises redis.exceptions.ConnectionError after `timeout` seconds without one, or if Redis is away."""
        try:
            async with asyncio.timeout(self.timeout):
                await self._turns.acquire()
        except TimeoutError:
            raise RedisConnectionError("No connection available.") from None
        try:
            connection = await super().get_connection(*arguments, **options)
        except BaseException:
            self._turns.release()
            raise
        self._given.add(id(connection))
        return connection

    async def release(self, connection: Any) -> None:
        try:
            await super().release(connection)
        finally:
            if id(connection) in self._given:  # not one that could not be made: its turn has been given back
                self._given.discard(id(connection))
                self._turns.release()
