"""The events of compiles, in Redis. Any gateway can read them, from any event on.

An event's id is its Redis stream id, which rises over restarts and takeovers, so `Last-Event-ID` works with every
gateway. Publish/subscribe only wakes waiters; a waiter also reads every few seconds, so a lost notification costs
seconds and never an event.
"""

from __future__ import annotations

from msgspec import Struct

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.api.trace_context import TraceContext, parse_traceparent
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts
from ..storage.redis.streams import STREAM_START


class CompileEvent(Struct, frozen=True):
    """One entry of a compile's stream. `error` is set on stage failed."""

    id: str
    progress: compiles.CompileProgress
    error: compiles.ErrorBody | None

    @property
    def last(self) -> bool:
        return self.progress.stage in ("done", "failed")


class CompileSnapshot(Struct, frozen=True):
    """The state of a compile: events after some id, whether its lease is held, whether it is cached. position: about
    where it stands in the queue, or stood before it was leased; 0: it is not there."""

    events: list[CompileEvent]
    leased: bool
    cached: bool
    position: int

    @property
    def pending(self) -> bool:
        """Whether it is queued, or was leased a while ago."""
        return self.position > 0


class CompileEvents:
    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def snapshot(self, key: str, after: str = STREAM_START) -> CompileSnapshot:
        """Everything after event `after`, in one round trip."""
        keys = self._keys
        entries, leased, cached, position = await self._scripts.snapshot(
            keys=[
                keys.events(key),
                keys.lease(key),
                keys.index(key),
                keys.pending,
                keys.pending_priorities,
            ],
            args=[after],
        )
        events = [_event(name, dict(zip(flat[::2], flat[1::2], strict=True))) for name, flat in entries]
        return CompileSnapshot(events, bool(leased), bool(cached), int(position))

    async def cause(self, key: str) -> TraceContext | None:
        """The span of whoever asked for the compile of `key` first. Raises RedisError."""
        header: bytes | None = await self._redis.hget(self._keys.run(key), "trace")
        return parse_traceparent((header or b"").decode())

    async def announce_waiter(self, key: str, waiter: str, seconds: float) -> None:
        time = await self._redis.time()
        until = time[0] * 1000 + time[1] // 1000 + int(seconds * 1000)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(self._keys.waiters(key), {waiter: until})
            pipe.pexpire(self._keys.waiters(key), int(seconds * 1000))
            await pipe.execute()

    async def remove_waiter(self, key: str, waiter: str) -> None:
        await self._redis.zrem(self._keys.waiters(key), waiter)


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> CompileEvent:
    progress = decoding.convert(
        {
            "stage": fields[b"stage"].decode(),
            "seconds": float(fields[b"seconds"]),
            "detail": fields[b"detail"].decode(),
        },
        type=compiles.CompileProgress,
    )
    error = decoding.from_json(fields[b"error"], type=compiles.ErrorBody) if fields[b"error"] else None
    return CompileEvent(entry_id.decode(), progress, error)
