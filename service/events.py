"""What waits on a compile: its events out of Redis, by any gateway, from any event on.

An event's id is its Redis stream id, which rises over restarts and takeovers, so `Last-Event-ID` works
against every gateway. Publish/subscribe only wakes who waits; a waiter also reads by itself every few
seconds, so a lost wake-up costs seconds and never an event.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..compiler import decoding, wire
from .scripts import Keys

log = structlog.get_logger(__name__)

START = "0-0"
_EVENT_ID = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)
_RECONNECT_SECONDS = 0.5


class Event(Struct, frozen=True):
    """One entry of a compile's stream. `error` is set on stage failed."""

    id: str
    progress: wire.Progress
    error: wire.ErrorBody | None

    @property
    def last(self) -> bool:
        return self.progress.stage in ("done", "failed")


class Glance(Struct, frozen=True):
    """The state of a compile: events after some id, whether its lease is held, whether it is cached."""

    events: list[Event]
    leased: bool
    cached: bool


def order(event_id: str) -> tuple[int, int]:
    """What to compare ids by."""
    milliseconds, _, count = event_id.partition("-")
    return int(milliseconds), int(count)


def is_event_id(text: str) -> bool:
    return _EVENT_ID.fullmatch(text) is not None


class WakeUps:
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
                    self._wake_all()  # what happened before we listened
                    async for message in channel.listen():
                        if message["type"] == "message":
                            for wake in self._waiting.get(message["data"].decode(), ()):
                                wake.set()
            except (RedisError, OSError) as error:
                log.warning("wake_channel_lost", error=str(error))
                await asyncio.sleep(_RECONNECT_SECONDS)

    def _wake_all(self) -> None:
        for waiters in self._waiting.values():
            for wake in waiters:
                wake.set()


class Events:
    """The events of one namespace's compiles."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def glance(self, key: str, after: str = START) -> Glance:
        """Everything after event `after`, in one round trip."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.xrange(self._keys.events(key), min=f"({after}")
            pipe.exists(self._keys.lease(key))
            pipe.exists(self._keys.index(key))
            entries, leased, cached = await pipe.execute()
        return Glance([_event(*entry) for entry in entries], bool(leased), bool(cached))

    async def wait_here(self, key: str, waiter: str, seconds: float) -> None:
        """Say that `waiter` waits for `key`, for `seconds` from now."""
        time = await self._redis.time()
        until = time[0] * 1000 + time[1] // 1000 + int(seconds * 1000)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(self._keys.waiters(key), {waiter: until})
            pipe.pexpire(self._keys.waiters(key), int(seconds * 1000))
            await pipe.execute()

    async def leave(self, key: str, waiter: str) -> None:
        await self._redis.zrem(self._keys.waiters(key), waiter)


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> Event:
    progress = decoding.convert(
        {
            "stage": fields[b"stage"].decode(),
            "seconds": float(fields[b"seconds"]),
            "detail": fields[b"detail"].decode(),
        },
        type=wire.Progress,
    )
    error = decoding.from_json(fields[b"error"], type=wire.ErrorBody) if fields[b"error"] else None
    return Event(entry_id.decode(), progress, error)
