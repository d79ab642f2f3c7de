"""Redis' notification channel: names of what changed in; whoever in this process waits for one of them is woken.

A notification that is lost costs seconds and never an event: whoever waits also reads by itself now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from .keys import Keys

log = structlog.get_logger(__name__)


_RECONNECT_SECONDS = 0.5


class Notifications:
    """Redis' wake channel, heard once for all namespaces: whom it wakes in vain looks, and finds nothing new."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @asynccontextmanager
    async def woken(self, key: str) -> AsyncIterator[asyncio.Event]:
        """An asyncio event that is set whenever something happened to `key`; clear it before looking."""
        wake = asyncio.Event()
        waiters = self._waiting.setdefault(key, set())
        waiters.add(wake)
        try:
            yield wake
        finally:
            waiters.discard(wake)
            if not waiters:
                self._waiting.pop(key, None)

    async def listen(self) -> None:
        """Pass wake-ups from Redis to whoever waits in this process; runs until cancelled."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._keys.wake)
                    self.wake_all()  # what happened before we listened
                    async for message in channel.listen():
                        if message["type"] == "message":
                            for wake in self._waiting.get(message["data"].decode(), ()):
                                wake.set()
            except (RedisError, OSError) as error:
                log.warning("wake_channel_lost", error=str(error))
                await asyncio.sleep(_RECONNECT_SECONDS)

    def wake_all(self) -> None:
        """Wake everything that waits in this process."""
        for waiters in self._waiting.values():
            for wake in waiters:
                wake.set()
