"""The compiles of a namespace that run or wait now."""

from __future__ import annotations

import asyncio

import msgspec

from ...compiler import decoding
from ...compiler.api.now import CurrentCompile
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from .events import CompileEvents
from .single_flight import CompileNeeds

_LISTED = 100


class CurrentCompiles:
    def __init__(self, redis: RedisClient, keys: Keys, events: CompileEvents) -> None:
        self._redis = redis
        self._keys = keys
        self._events = events

    async def read(self) -> tuple[list[CurrentCompile], int]:
        """At most _LISTED, those that run first; and how many others there are. Raises RedisError."""
        seconds, micros = await self._redis.time()
        now = seconds * 1000 + micros // 1000
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zrange(self._keys.active, f"({now}", "+inf", byscore=True, offset=0, num=_LISTED)
            pipe.zcount(self._keys.active, f"({now}", "+inf")
            found, count = await pipe.execute()
        names = [name.decode() for name in found]
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self._keys.run(name), ["started", "needs"])
            runs = await pipe.execute()
        compiles = await asyncio.gather(
            *(self._compile(name, now, *run) for name, run in zip(names, runs, strict=True))
        )
        compiles.sort(key=lambda each: (each.position, -each.seconds))
        return compiles, count - len(names)

    async def _compile(
        self, key: str, now: int, started: bytes | None, needs: bytes | None
    ) -> CurrentCompile:
        snapshot = await self._events.snapshot(key)
        progress = snapshot.events[-1].progress if snapshot.events else None
        return CurrentCompile(
            key=key,
            target=_target(needs),
            stage=progress.stage if progress else "queued",
            detail=progress.detail if progress else "",
            seconds=max(now - int(started), 0) / 1000 if started and started.isdigit() else 0.0,
            position=0 if snapshot.leased else max(snapshot.position, 1),
        )


def _target(packed: bytes | None) -> str:
    """What people call it; '' for what another release has written."""
    try:
        target = decoding.from_msgpack(packed or b"", type=CompileNeeds).target
    except msgspec.MsgspecError:
        return ""
    return target.name or target.kind
