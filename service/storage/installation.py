"""Which installation Redis and the blob store belong to: an id in each. Where they differ, nothing is deleted.

Redis may come back empty or from a backup, and a gateway may be given another store. Then Redis does not know what the
store holds, and everything there looks like remains of crashes. `torchrelay cache reindex` ends that state. What does
look so is marked first, and deleted a day later.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec
import obstore
import structlog
from msgspec import Struct
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore
from redis.exceptions import RedisError

from ...compiler import decoding
from ...compiler.errors import Unavailable
from .outages import StoreOutages
from .redis.connections import RedisClient
from .redis.keys import Keys

log = structlog.get_logger(__name__)

State = Literal["same", "lost", "older", "foreign"]

IDENTITY = "installation"
"""The object in the store."""
_LOOK_SECONDS = 60.0
_COUNT_SECONDS = 3600.0
_SWEEP_BATCH = 200
"""Objects that are looked up in Redis together."""
MARKED = timedelta(days=1)
"""How long what nothing names stays after it was found."""

_REASONS = {
    "lost": "Redis does not know what the blob store holds: it was emptied, or is another installation's",
    "older": "Redis is older than the blob store: it was restored from a backup",
    "foreign": "the blob store is not the one that this installation's artifacts are in",
}
_HINT = "Give all gateways one store; if this one is right, `torchrelay cache reindex`"


class StoreIdentity(Struct, frozen=True):
    """What it holds. sweeps: how often it was swept; Redis has counted at least as many."""

    id: str
    sweeps: int = 0


class Installation:
    """`state`: what was found last."""

    def __init__(
        self, redis: RedisClient, keys: Keys, store: ObjectStore, outages: StoreOutages | None = None
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._store = store
        self.outages = outages or StoreOutages()
        self._looked = self._counted = -math.inf
        self._belonged = False
        self.state: State = "same"

    async def check_store(self) -> None:
        """Raises Unavailable if the store is another installation's, or cannot be read; RedisError if that was never
        known."""
        if self.state == "foreign" or time.monotonic() - self._looked > _LOOK_SECONDS:
            try:
                await self.look()
            except RedisError:  # a hit needs no more than that it was the right one
                if not self._belonged:
                    raise
        if self.state == "foreign":
            raise Unavailable(_REASONS["foreign"], hint=_HINT)

    async def problem(self) -> str:
        """Why this gateway cannot serve large artifacts, or ''."""
        if self.state == "foreign":
            await self.look()
        return _REASONS["foreign"] if self.state == "foreign" else ""

    async def may_delete(self, age: timedelta) -> bool:
        """Whether what Redis has not named for `age` can be nobody's. Logs why not. Raises Unavailable, RedisError."""
        if await self.look() != "same":
            log.error("sweep_refused", reason=_REASONS[self.state], hint=_HINT)
            return False
        since = float(await self._redis.hget(self._keys.identity, "since") or 0)
        return time.time() - since / 1000 > age.total_seconds()

    async def sweep(
        self, folder: str, marks: str, age: timedelta, used: Callable[[list[str]], Awaitable[list[bool]]]
    ) -> int:
        """Deletes what of `folder` is older than `age`, not `used` (by their paths), and was so a day ago already.

        marks: the Redis key for what was found. Returns how many went. Raises Unavailable, RedisError.
        """
        if not await self.may_delete(age):
            return 0
        await self._count()
        known = dict(await self._redis.zrange(marks, 0, -1, withscores=True))
        now = datetime.now(UTC)
        gone = 0
        with self.outages.as_unavailable("sweep"):  # another gateway may sweep too
            async for batch in obstore.list(self._store, folder, chunk_size=_SWEEP_BATCH):
                old = [entry["path"] for entry in batch if entry["last_modified"] < now - age]
                for path, is_used in zip(old, await used(old) if old else [], strict=True):
                    if is_used:
                        continue
                    found = known.pop(path.encode(), None)
                    if found is None:
                        await self._redis.zadd(marks, {path: now.timestamp()}, nx=True)
                    elif found < (now - MARKED).timestamp():
                        await obstore.delete_async(self._store, path)
                        await self._redis.zrem(marks, path)
                        gone += 1
            if known:  # used by now, or deleted
                await self._redis.zrem(marks, *known)
        return gone

    async def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder of the store. Raises Unavailable."""
        with self.outages.as_unavailable("read"):
            found = await obstore.list_with_delimiter_async(self._store, folder)
            return sorted(path.rpartition("/")[2] for path in found["common_prefixes"])
        return []

    async def adopt(self) -> None:
        """Redis knows what this store holds: they belong together from now on. Raises Unavailable, RedisError."""
        stored = await self._stored() or await self._create()
        await self._redis.hset(
            self._keys.identity,
            mapping={"id": stored.id, "sweeps": stored.sweeps, "since": int(time.time() * 1000)},
        )
        await self.look()

    async def look(self) -> State:
        """What the ids say now. The first gateway of an installation makes them. Raises Unavailable, RedisError."""
        stored = await self._stored()
        known, sweeps = await self._redis.hmget(self._keys.identity, "id", "sweeps")
        if known is None:
            stored = stored or await self._create()
            if not await self._is_empty():
                return self._set_state("lost")
            await self._redis.hsetnx(self._keys.identity, "since", int(time.time() * 1000))
            await self._redis.hsetnx(self._keys.identity, "id", stored.id)
            known = await self._redis.hget(self._keys.identity, "id")
        elif stored is None and self._belonged:  # it has lost everything since
            stored = StoreIdentity(known.decode(), int(sweeps or 0))
            await self._put(stored, "overwrite")
        if stored is None or known is None or stored.id != known.decode():
            return self._set_state("foreign")
        return self._set_state("older" if int(sweeps or 0) < stored.sweeps else "same")

    def _set_state(self, state: State) -> State:
        self._looked = time.monotonic()
        if state != self.state:
            log.warning("installation", state=state, reason=_REASONS.get(state, ""))
        self.state = state
        self._belonged = self._belonged or state == "same"
        return state

    async def _count(self) -> None:
        """So that a Redis from before this sweep is known to be one. Redis first: it must not be behind."""
        if time.monotonic() - self._counted > _COUNT_SECONDS and (stored := await self._stored()) is not None:
            sweeps = await self._redis.hincrby(self._keys.identity, "sweeps", 1)
            await self._put(StoreIdentity(stored.id, sweeps), "overwrite")
            self._counted = time.monotonic()

    async def _is_empty(self) -> bool:
        with self.outages.as_unavailable("read"):
            async for batch in obstore.list(self._store):
                if any(entry["path"] != IDENTITY for entry in batch):
                    return False
        return True

    async def _stored(self) -> StoreIdentity | None:
        with self.outages.as_unavailable("read"):
            found = await obstore.get_async(self._store, IDENTITY)
            try:
                return decoding.from_json(bytes(await found.bytes_async()), type=StoreIdentity)
            except msgspec.DecodeError as error:
                raise Unavailable(f"the blob store's object {IDENTITY!r} cannot be read: {error}") from None
        return None

    async def _create(self) -> StoreIdentity:
        made = StoreIdentity(secrets.token_hex(16))
        try:
            await self._put(made, "create")
        except AlreadyExistsError:  # by another gateway, a moment ago
            return await self._stored() or made
        return made

    async def _put(self, identity: StoreIdentity, mode: Literal["create", "overwrite"]) -> None:
        with self.outages.as_unavailable("write"):
            await obstore.put_async(self._store, IDENTITY, msgspec.json.encode(identity), mode=mode)
