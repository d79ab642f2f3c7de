"""The jobs of all namespaces that have not ended, and which of them a dispatcher may take."""

from __future__ import annotations

from typing import NamedTuple

from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys


class OpenJob(NamedTuple):
    """due: no dispatcher runs it, or has not said so for a lease's time."""

    kind: str
    namespace: str
    id: str
    due: bool


class OpenJobs:
    """Every method raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def read(self) -> list[OpenJob]:
        """Those that have waited longest come first."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.zrange(self._keys.open_jobs, 0, -1, withscores=True)
            (seconds, micros), found = await pipe.execute()
        now = seconds * 1000 + micros // 1000
        return [
            OpenJob(*named, due=score <= now)
            for key, score in found
            if (named := self._keys.opened_job(key.decode())) is not None
        ]

    async def states(self, jobs: list[OpenJob]) -> list[str]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.hget(self._keys.of(job.namespace).jobs["train"].job(job.id), "state")
            return [state.decode() for state in await pipe.execute() if state]
