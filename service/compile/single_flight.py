"""Stage 5: single flight. A lease in Redis says who compiles a key; the same scripts write the compile's events.

A lease is `owner:fence` under a key with an expiry. Only its holder writes events, fails or publishes. It
renews in time, or someone who waits takes over; a fence never comes twice, so what an old holder still sends
is refused. All of it is in storage/redis/lua/, so that every step is one atomic script.
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from ...compiler import decoding
from ...compiler.api import compiles
from ...compiler.errors import Overloaded, OverQuota, RelayError, from_code
from ...compiler.request import codec
from ..settings import ServiceSettings
from ..storage.redis.connections import reserved_for_leases
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ..storage.redis.lease import Lease
from ..storage.redis.scripts import Scripts


class LeaseGrant(Struct, frozen=True):
    """The lease is ours; `body` is the request to compile."""

    lease: Lease
    body: bytes


LeaseRenewal = Literal["held", "retaken", "lost", "published", "abandoned"]


class Leases:
    def __init__(self, redis: Redis, keys: Keys, scripts: Scripts, settings: ServiceSettings) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._lease_ms = int(settings.lease_seconds * 1000)
        self._ttl_ms = int((settings.progress_ttl_seconds + settings.compile_deadline_seconds) * 1000)
        self._abandon_ms = int(settings.abandon_seconds * 1000)
        self._max_queued = settings.max_queued
        self._quota = settings
        self._retry_after = settings.retry_after_seconds
        self._period_ms = int(settings.quota_period_seconds * 1000)

    async def ask(self, key: str, body: bytes, *, finish: bool) -> LeaseGrant | Literal["hit", "wait"]:
        """Take the lease of `key`, or join who holds it ("wait"), or learn that it is cached by now ("hit").

        Raises Overloaded when too many compiles wait, OverQuota, and the remembered error of a compile that just
        failed.
        """
        owner, keys = uuid.uuid4().hex, self._keys
        answer = await self._acquire(key, owner, body, finish=finish, mode="ask")
        match answer:
            case [b"lease", fence, _]:
                return LeaseGrant(Lease(key, owner, fence.decode()), body)
            case [b"hit"]:
                return "hit"
            case [b"failed", error]:
                raise decode_error(error)
            case [b"overloaded", queued, b"all"]:
                raise Overloaded(f"{int(queued)} compiles are queued already, the most that may")
            case [b"overloaded", queued, _]:
                raise Overloaded(
                    f"{int(queued)} compiles of namespace {keys.namespace} are queued, its share at this load"
                )
            case [b"compiles", most]:
                raise OverQuota(
                    f"namespace {keys.namespace} compiles {most.decode()} graphs already, its quota",
                    retry_after=self._retry_after,
                )
            case [b"seconds", most, left]:
                raise OverQuota(
                    f"namespace {keys.namespace} has spent its quota of {most.decode()} compile seconds",
                    hint=f"Its next period begins in {-(-int(left) // 1000)} s; until then, compile locally",
                    retry_after=max(1, -(-int(left) // 1000)),
                )
        return "wait"

    async def take_over(self, key: str) -> LeaseGrant | None:
        """Take the lease of a compile whose holder died; None if it lives, is over, or is not known."""
        owner = uuid.uuid4().hex
        match await self._acquire(key, owner, b"", finish=False, mode="takeover"):
            case [b"lease", fence, body]:
                return LeaseGrant(Lease(key, owner, fence.decode()), body)
        return None

    async def _acquire(
        self, key: str, owner: str, body: bytes, *, finish: bool, mode: Literal["ask", "takeover"]
    ) -> list[bytes]:
        keys = self._keys
        answer: list[bytes] = await self._scripts.acquire(
            keys=[
                keys.index(key),
                keys.failed(key),
                keys.lease(key),
                keys.fence,
                keys.active,
                keys.events(key),
                keys.request(key),
                keys.run(key),
                keys.waiters(key),
                keys.stats,
                keys.namespaces,
                keys.spent,
            ],
            args=[
                key,
                owner,
                self._lease_ms,
                self._max_queued,
                body,
                self._ttl_ms,
                int(finish),
                mode,
                keys.wake,
                self._abandon_ms,
                keys.installation,
                DEFAULT_NAMESPACE,
                keys.namespace,
                self._quota.namespace_compiles,
                self._quota.namespace_compile_seconds,
            ],
        )
        return answer

    async def renew(self, granted: LeaseGrant, *, finish: bool) -> tuple[LeaseRenewal, LeaseGrant]:
        """Keep the lease; what became of it, and the lease to go on with ("retaken" has a new fence)."""
        keys, lease = self._keys, granted.lease
        key = lease.key
        with reserved_for_leases():
            answer = await self._scripts.renew(
                keys=[
                    keys.index(key),
                    keys.lease(key),
                    keys.fence,
                    keys.active,
                    keys.events(key),
                    keys.request(key),
                    keys.run(key),
                    keys.waiters(key),
                ],
                args=[
                    key,
                    lease.owner,
                    self._lease_ms,
                    granted.body,
                    self._ttl_ms,
                    int(finish),
                    keys.wake,
                    self._abandon_ms,
                ],
            )
        match answer:
            case [b"lost"]:
                return "lost", granted
            case [b"published"]:
                return "published", granted
        fresh = LeaseGrant(msgspec.structs.replace(lease, fence=answer[1].decode()), granted.body)
        if answer[0] == b"retaken":
            return "retaken", fresh
        return ("held" if answer[2] else "abandoned"), fresh

    async def progress(self, lease: Lease, stage: compiles.Stage, detail: str) -> bool:
        """Append an event; false when the lease is not ours any more."""
        keys, key = self._keys, lease.key
        return bool(
            await self._scripts.progress(
                keys=[keys.lease(key), keys.events(key), keys.run(key)],
                args=[key, lease.token, stage, detail, self._ttl_ms, keys.wake],
            )
        )

    async def fail(self, lease: Lease, error: RelayError, *, remember_seconds: float) -> bool:
        """End the compile with an error; false when the lease is not ours any more."""
        keys, key = self._keys, lease.key
        return bool(
            await self._scripts.fail(
                keys=[
                    keys.lease(key),
                    keys.events(key),
                    keys.run(key),
                    keys.request(key),
                    keys.active,
                    keys.waiters(key),
                    keys.failed(key),
                    keys.stats,
                ],
                args=[
                    key,
                    lease.token,
                    encode_error(error),
                    error.message,
                    int(remember_seconds * 1000),
                    self._ttl_ms,
                    keys.wake,
                ],
            )
        )

    async def charge(self, seconds: float) -> None:
        """Note that a worker spent so long on this namespace's compiles, whatever came of it."""
        await self._scripts.charge(
            keys=[self._keys.spent, self._keys.stats], args=[f"{seconds:.6f}", self._period_ms]
        )

    async def release(self, lease: Lease) -> None:
        """Give the lease back unfinished, so that someone who waits takes over at once."""
        keys = self._keys
        await self._scripts.release(
            keys=[keys.lease(lease.key), keys.active], args=[lease.key, lease.token, keys.wake]
        )


def encode_error(error: RelayError) -> bytes:
    return codec.to_json(compiles.ErrorBody(error.code, error.message, error.advice))


def decode_error(data: bytes) -> RelayError:
    body = decoding.from_json(data, type=compiles.ErrorBody)
    return from_code(body.code, body.message, body.hint)
