"""The live dispatchers and their workers, as each dispatcher writes them to Redis and every gateway reads them."""

from __future__ import annotations

import time

import msgspec
import structlog
from msgspec import Struct

from ...compiler import decoding
from ...compiler.api.compiles import WorkerInfo
from ...compiler.api.training.jobs import TrainSpec
from ...compiler.request.schema import builds_for
from ..base.async_tasks import Recent
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from .single_flight import CompileNeeds

log = structlog.get_logger(__name__)

_FRESH_SECONDS = 0.2
"""How old an answer may be: a thousand clients may ask at once."""
STARTING = "starting"
"""The problem of a dispatcher whose workers were not started yet."""


class DispatcherInfo(Struct, frozen=True):
    """What a dispatcher says of itself. problem: why it cannot use its workers, or ''. nodes: the resources of each
    node, in Ray's names. cluster: the same for all that share a Ray cluster. promised: the room of training jobs that
    it has taken and that have no ranks yet."""

    id: str
    problem: str
    workers: list[WorkerInfo]
    nodes: list[dict[str, float]]
    revision: str
    """The revision of requests that it compiles (schema.REVISION)."""
    cluster: str = ""
    promised: list[TrainSpec] = []

    @property
    def ready(self) -> bool:
        """Whether a worker of it is warm."""
        return not self.problem and any(worker.state in ("idle", "busy") for worker in self.workers)

    def may_compile(self, needs: CompileNeeds) -> bool:
        """Whether it has a worker for this, or one that starts and may turn out to be for it."""
        return self.revision == needs.revision and any(_may_compile(each, needs) for each in self.workers)


class DispatcherRegistry:
    def __init__(self, redis: RedisClient, keys: Keys, *, expiry_seconds: float) -> None:
        """expiry_seconds: how long an entry stays that is not written again."""
        self._redis = redis
        self._keys = keys
        self.expiry_seconds = expiry_seconds
        self._expiry_ms = int(expiry_seconds * 1000)
        self._recent: Recent[list[DispatcherInfo]] = Recent(_FRESH_SECONDS)
        self._last: list[DispatcherInfo] = []
        self._missing: dict[str, float] = {}
        """Since when a dispatcher of the last answer has had no entry, on the monotonic clock."""

    async def dispatchers(self) -> list[DispatcherInfo]:
        """Those that live. One whose entry is missing has half of `expiry_seconds` to write it again: Redis may have
        lost its memory, or all machines but this have stood still. Raises RedisError."""
        return await self._recent.get(self._read)

    async def workers(self) -> list[WorkerInfo]:
        """The workers of all dispatchers. Raises RedisError."""
        return [worker for each in await self.dispatchers() for worker in each.workers]

    async def write(self, info: DispatcherInfo) -> None:
        """Raises RedisError."""
        seconds, micros = await self._redis.time()
        now = seconds * 1000 + micros // 1000
        async with self._redis.pipeline(transaction=False) as pipe:  # who reads needs both, entry and name
            pipe.set(self._keys.dispatcher(info.id), msgspec.msgpack.encode(info), px=self._expiry_ms)
            pipe.zremrangebyscore(self._keys.dispatchers, "-inf", now)
            pipe.zadd(self._keys.dispatchers, {info.id: now + self._expiry_ms})
            await pipe.execute()

    async def remove(self, dispatcher: str) -> None:
        """Raises RedisError."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._keys.dispatcher(dispatcher))
            pipe.zrem(self._keys.dispatchers, dispatcher)
            await pipe.execute()

    async def _read(self) -> list[DispatcherInfo]:
        names = [name.decode() for name in await self._redis.zrange(self._keys.dispatchers, 0, -1)]
        found = await self._redis.mget([self._keys.dispatcher(name) for name in names]) if names else []
        written = [info for data in found if data is not None and (info := _decoded(data)) is not None]
        self._last = [*written, *self._late({info.id for info in written})]
        return self._last

    def _late(self, written: set[str]) -> list[DispatcherInfo]:
        """Those of the last answer that may still write their entries again."""
        now = time.monotonic()
        gone = [info for info in self._last if info.id not in written]
        self._missing = {info.id: self._missing.get(info.id, now) for info in gone}
        return [info for info in gone if now - self._missing[info.id] < self.expiry_seconds / 2]


def _decoded(data: bytes) -> DispatcherInfo | None:
    try:
        return decoding.from_msgpack(data, type=DispatcherInfo)
    except msgspec.MsgspecError as error:  # a dispatcher of another version
        log.warning("dispatcher_not_readable", error=str(error))
        return None


def _may_compile(worker: WorkerInfo, needs: CompileNeeds) -> bool:
    if worker.state == "dead" or worker.target.kind != needs.target.kind:
        return False
    if not worker.toolchain.torch:  # it starts
        return True
    return builds_for(worker.toolchain, worker.target, worker.others, needs.toolchain, needs.target)
