"""The jobs of all namespaces that have not ended, and which of them a dispatcher may take."""

from __future__ import annotations

from typing import NamedTuple

from ..access.namespaces import Namespaces
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys

_LIST_SECONDS = 300.0
_BATCH = 100


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
        """Of training jobs."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job in jobs:
                pipe.hget(self._keys.of(job.namespace).training_jobs.job(job.id), "state")
            return [state.decode() for state in await pipe.execute() if state]

    async def add_older(self, namespaces: Namespaces) -> None:
        """Adds jobs that an older version has opened, unless a dispatcher has done so lately."""
        if not await self._redis.set(self._keys.open_jobs_listed, 1, nx=True, px=int(_LIST_SECONDS * 1000)):
            return
        names = await namespaces.names()
        for first in range(0, len(names), _BATCH):
            of = [
                jobs
                for keys in map(self._keys.of, names[first : first + _BATCH])
                for jobs in (keys.tuning_jobs, keys.training_jobs)
            ]
            async with self._redis.pipeline(transaction=False) as pipe:
                for jobs in of:
                    pipe.zrange(jobs.open, 0, -1)
                found = await pipe.execute()
            older = {
                jobs.job(name.decode()): 0 for jobs, names in zip(of, found, strict=True) for name in names
            }
            if older:
                await self._redis.zadd(self._keys.open_jobs, older, nx=True)
