"""The open compiles of all namespaces that a dispatcher may take: they are queued, or their holder died."""

from __future__ import annotations

import msgspec
import structlog
from msgspec import MsgspecError, Struct

from ...compiler import decoding
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from .single_flight import CompileNeeds, Priority

log = structlog.get_logger(__name__)


class PendingCompile(Struct, frozen=True):
    """waited: seconds since any dispatcher may take it. unwanted: for how many seconds no job has waited for it."""

    namespace: str
    key: str
    needs: CompileNeeds
    waited: float = 0.0
    priority: Priority = Priority.PERSON
    unwanted: float = 0.0


class PendingCompiles:
    def __init__(self, redis: RedisClient, keys: Keys, *, most: int) -> None:
        """most: compiles that are read at once."""
        self._redis = redis
        self._keys = keys
        self._most = most
        self._unwanted: dict[str, float] = {}
        """What no job waits for, by the lease's name; since when, ms."""
        self._known: dict[str, PendingCompile] = {}
        """Those of the last look, by the lease's name. A cache key has always the same needs."""

    async def due(self) -> list[PendingCompile]:
        """Those that have waited longest come first. Raises RedisError."""
        seconds, micros = await self._redis.time()
        now = seconds * 1000 + micros // 1000
        found = await self._redis.zrange(
            self._keys.pending,
            "-inf",
            now,
            byscore=True,
            offset=0,
            num=self._most,
            withscores=True,
        )
        scores = {name.decode(): score for name, score in found}
        leases = list(scores)
        await self._read([lease for lease in leases if lease not in self._known])
        self._known = {lease: self._known[lease] for lease in leases if lease in self._known}
        priorities = await self._of_jobs(now)
        return [
            msgspec.structs.replace(
                compile,
                waited=(now - scores[lease]) / 1000,
                priority=priorities.get(lease, Priority.PERSON),
                unwanted=(now - self._unwanted.get(lease, now)) / 1000,
            )
            for lease, compile in self._known.items()
        ]

    async def _of_jobs(self, now: int) -> dict[str, Priority]:
        """The priorities of what jobs have queued. Notes what of it nobody waits for."""
        found = await self._redis.hgetall(self._keys.pending_priorities)
        priorities = {lease.decode(): Priority(int(priority)) for lease, priority in found.items()}
        due = [lease for lease in priorities if lease in self._known]
        async with self._redis.pipeline(transaction=False) as pipe:
            for compile in map(self._known.__getitem__, due):
                pipe.zcount(self._keys.of(compile.namespace).waiters(compile.key), now, "+inf")
            waiters = await pipe.execute()
        unwanted = [lease for lease, count in zip(due, waiters, strict=True) if not count]
        self._unwanted = {lease: self._unwanted.get(lease, now - 1) for lease in unwanted}
        return priorities

    async def _read(self, leases: list[str]) -> None:
        named = {lease: self._keys.leased(lease) for lease in leases}
        async with self._redis.pipeline(transaction=False) as pipe:
            for namespace, key in filter(None, named.values()):
                pipe.hget(self._keys.of(namespace).run(key), "needs")
            answers = iter(await pipe.execute())
        for lease, found in named.items():
            packed = next(answers) if found else None
            if packed is None:  # Redis has lost a part of it; who waits asks again
                log.error("queued_compile_lost", lease=lease)
                await self._redis.zrem(self._keys.pending, lease)
                continue
            try:
                needs = decoding.from_msgpack(packed, type=CompileNeeds)
            except MsgspecError as error:  # a gateway of another release queued it, for a dispatcher of that
                log.warning("queued_compile_not_readable", lease=lease, error=str(error))
                continue
            assert found is not None
            self._known[lease] = PendingCompile(*found, needs)
