"""A pool that gives Redis connections in the order in which they were asked for; some are reserved for leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from .retry import resets_are_outages

_for_leases = ContextVar("_for_leases", default=False)


@contextlib.contextmanager
def reserved_for_leases() -> Iterator[None]:
    """Inside, a connection is one of those reserved for leases, so that no lease expires behind a thousand requests."""
    token = _for_leases.set(True)
    try:
        yield
    finally:
        _for_leases.reset(token)


def leases_are_meant() -> bool:
    """Whether this is inside `reserved_for_leases`."""
    return _for_leases.get()


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
        self._turn_of: dict[int, asyncio.Semaphore] = {}
        """The id of each connection in use to what its turn goes back to."""

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Raises redis.exceptions.ConnectionError after `timeout` seconds without one, or if Redis is away."""
        turns = self._lease_turns if leases_are_meant() else self._turns
        try:
            async with asyncio.timeout(self.timeout):
                await turns.acquire()
        except TimeoutError:
            raise RedisConnectionError("No connection available.") from None
        try:
            with resets_are_outages():
                connection = await super().get_connection(*arguments, **options)  # type: ignore[no-untyped-call]  # of redis-py
        except BaseException:
            turns.release()
            raise
        self._turn_of[id(connection)] = turns
        return connection

    async def release(self, connection: Any) -> None:
        try:
            await super().release(connection)
        finally:  # one that could not be made is not there: its turn has been given back
            if (turns := self._turn_of.pop(id(connection), None)) is not None:
                turns.release()
