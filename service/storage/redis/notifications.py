"""Redis' notification channel: it carries names of what changed, and wakes the tasks that wait for them here.

A lost notification costs seconds and never an event: every waiter also reads every few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .connections import RedisClient
from .keys import Keys

log = structlog.get_logger(__name__)

_RECONNECT_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""After this long without a message, Redis is asked whether it is there; it has as long to answer."""


class Notifications:
    """The wake channel, subscribed to once for all namespaces. A needless notification does no harm."""

    def __init__(self, redis: RedisClient, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @asynccontextmanager
    async def woken(self, key: str) -> AsyncIterator[asyncio.Event]:
        """An asyncio event that is set whenever `key` has changed. Clear it before you read."""
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
        """Passes notifications from Redis to the waiters of this process; runs until cancelled."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._keys.wake)
                    self.wake_all()  # for what happened before the subscription
                    await self._pass_on(channel)
            except (RedisError, OSError) as error:
                log.warning("wake_channel_lost", error=str(error))
                await asyncio.sleep(_RECONNECT_SECONDS)

    async def _pass_on(self, channel: PubSub) -> None:
        """Raises RedisError: also if nothing answers any more, as after the loss of the primary's machine."""
        asked = False
        while True:
            message = await channel.get_message(timeout=QUIET_SECONDS)
            if message is None and asked:
                raise RedisTimeoutError("the wake channel does not answer")
            asked = message is None
            if message is None:
                await channel.ping()
            elif message["type"] == "message":
                self.wake(message["data"].decode())

    def wake(self, key: str) -> None:
        for wake in self._waiting.get(key, ()):
            wake.set()

    def wake_all(self) -> None:
        for waiters in self._waiting.values():
            for wake in waiters:
                wake.set()
