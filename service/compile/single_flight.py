"""Stage 5: single flight. Redis has the open compiles, the lease of each, and their events.

A gateway queues a compile. A dispatcher takes its lease: `owner:fence` under a key with an expiry. Only the holder
writes events, fails or publishes. If it does not renew the lease in time, another dispatcher takes it over. A fence
never comes twice, so writes of an old holder are refused. Every step is one Lua script (storage/redis/lua/lease/).
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from enum import IntEnum
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct

from ...compiler import VERSION, decoding
from ...compiler.api import compiles
from ...compiler.api.trace_context import TraceContext, parse_traceparent
from ...compiler.errors import Overloaded, OverQuota, RelayError, from_code
from ...compiler.request import codec, schema
from ..admission.compile_request import CompileRequest
from ..base.settings import ServiceSettings
from ..base.tracing import trace_header
from ..storage.redis.fair_pool import reserved_for_leases
from ..storage.redis.keys import COMPILES_WAIT, DEFAULT_NAMESPACE, Keys
from ..storage.redis.scripts import Scripts


class Priority(IntEnum):
    """Who waits for a compile. The lower comes first."""

    PERSON = 0
    DEVICES = 1
    """A training job, whose devices wait for it."""
    BATCH = 2
    """A tuning job."""


class CompileNeeds(Struct, frozen=True):
    """Which workers can compile a request, and what else its compile may fail of."""

    toolchain: schema.Toolchain
    target: schema.Target
    revision: str
    """That of the gateway that made its key (schema.REVISION)."""
    unkeyed: str = ""
    """A digest of what a failure depends on besides the key: a request that differs in it is compiled all the same."""
    priority: Priority = Priority.PERSON
    """With which it is queued."""
    dispatcher: str = ""
    """The dispatcher that runs the tuning job, or '': it hears what the compile searches if it takes it."""


class Lease(Struct, frozen=True):
    """The right to compile `body`, a request with this key. `fence` rises with every lease given out."""

    key: str
    owner: str
    fence: str
    body: bytes
    needs: CompileNeeds
    taken: int = 1
    """How often a lease of this compile was taken."""
    waited: float = 0.0
    """Seconds since it was queued, when the lease was taken."""
    wanted: bool = True
    """Whether a client waited for it then."""
    trace: TraceContext | None = None
    """The span of whoever asked first."""
    killed: int = 0
    """How many workers have died of it."""

    @property
    def token(self) -> str:
        """The lease as Redis stores it."""
        return f"{self.owner}:{self.fence}"


_LONGEST_MEMORY_MS = 3_600_000
_LATER_SECONDS = 0.02
LeaseRenewal = Literal["held", "retaken", "lost", "published", "abandoned"]


class Leases:
    def __init__(self, keys: Keys, scripts: Scripts, settings: ServiceSettings) -> None:
        self._keys = keys
        self._scripts = scripts
        self._settings = settings
        self._lease_ms = int(settings.lease_seconds * 1000)
        self._ttl_ms = int((settings.progress_ttl_seconds + settings.compile_deadline_seconds) * 1000)
        self._abandon_ms = int(settings.abandon_seconds * 1000)

    def needs(self, request: CompileRequest) -> CompileNeeds:
        """What this request needs, under the limits of this installation's compiles and the code of this version."""
        limits = self._settings.compile_deadline_seconds, self._settings.worker_memory_limit_bytes
        known = VERSION, *limits, request.unkeyed
        return CompileNeeds(
            request.toolchain,
            request.target,
            schema.REVISION,
            hashlib.sha256(msgspec.msgpack.encode(known)).hexdigest()[:16],
        )

    async def queue(self, key: str, body: bytes, needs: CompileNeeds) -> Literal["hit", "wait", "queued"]:
        """Queues the compile of `key` for a dispatcher. "wait": it is queued already, or runs. "hit": the artifact is
        cached by now. What is queued at a lower priority gets this one.

        Raises Overloaded, OverQuota, or the remembered error of a compile that just failed.
        """
        ask = partial(self.acquire, key, uuid.uuid4().hex, needs=needs, mode="queue")
        while (answer := await ask(b"")) == [b"later"]:  # another gateway is sending the body
            await asyncio.sleep(_LATER_SECONDS)
        return self._queued(await ask(body) if answer == [b"body"] else answer)

    def _queued(self, answer: list[bytes]) -> Literal["hit", "wait", "queued"]:
        namespace = self._keys.namespace
        match answer:
            case [b"hit"]:
                return "hit"
            case [b"queued"]:
                return "queued"
            case [b"failed", error]:
                known = decoding.from_json(error, type=compiles.ErrorBody)
                raise from_code(known.code, known.message, known.hint)
            case [b"overloaded", queued, b"all"]:
                raise Overloaded(f"{int(queued)} compiles are queued already, the most that may")
            case [b"overloaded", queued, b"bytes"]:
                raise Overloaded(
                    f"the requests of queued compiles have {int(queued)} bytes, and no room for more"
                )
            case [b"overloaded", queued, _]:
                raise Overloaded(
                    f"{int(queued)} compiles of namespace {namespace} are queued, its share at this load"
                )
            case [b"compiles", most]:
                raise OverQuota(
                    f"namespace {namespace} compiles {most.decode()} graphs already, its quota",
                    retry_after=self._settings.retry_after_seconds,
                )
            case [b"seconds", most, left]:
                seconds = max(1, -(-int(left) // 1000))
                raise OverQuota(
                    f"namespace {namespace} has spent its quota of {most.decode()} compile seconds",
                    hint=f"Its next period begins in {seconds} s; until then, compile locally",
                    retry_after=seconds,
                )
        return "wait"

    async def take(self, key: str, needs: CompileNeeds) -> Lease | None:
        """Takes the lease of a compile that is queued, or whose holder died; None if that lives, or if the compile is
        over or not known."""
        owner = uuid.uuid4().hex
        match await self.acquire(key, owner, b"", needs=needs, mode="take"):
            case [b"lease", fence, body, taken, waited_ms, wanted, trace, needs_packed, killed]:
                return Lease(
                    key,
                    owner,
                    fence.decode(),
                    body,
                    decoding.from_msgpack(needs_packed, type=CompileNeeds),
                    int(taken),
                    int(waited_ms) / 1000,
                    wanted=bool(int(wanted)),
                    trace=parse_traceparent(trace.decode()),
                    killed=int(killed),
                )
        return None

    async def acquire(
        self,
        key: str,
        owner: str,
        body: bytes,
        *,
        needs: CompileNeeds,
        mode: Literal["queue", "take"],
    ) -> list[bytes]:
        keys, settings = self._keys, self._settings
        answer: list[bytes] = await self._scripts.acquire(
            keys=keys.compile_keys(key, needs.unkeyed),
            args=[
                *self._renewal(key, owner, body, needs),
                mode,
                COMPILES_WAIT,
                settings.max_queued,
                keys.namespace,
                DEFAULT_NAMESPACE,
                settings.namespace_compiles,
                settings.namespace_compile_seconds,
                trace_header(),
                settings.queued_bytes,
                int(needs.priority),
            ],
        )
        return answer

    async def renew(self, lease: Lease) -> tuple[LeaseRenewal, Lease]:
        """What became of the lease, and the lease to go on with: a "retaken" one has a new fence."""
        with reserved_for_leases():
            answer = await self._renew(lease, b"")
            if answer == [b"body"]:
                answer = await self._renew(lease, lease.body)
        match answer:
            case [b"lost"]:
                return "lost", lease
            case [b"published"]:
                return "published", lease
        lease = msgspec.structs.replace(lease, fence=answer[1].decode())
        if answer[0] == b"retaken":
            return "retaken", lease
        return ("held" if answer[2] else "abandoned"), lease

    async def _renew(self, lease: Lease, body: bytes) -> list[bytes]:
        answer: list[bytes] = await self._scripts.renew(
            keys=self._keys.compile_keys(lease.key),
            args=self._renewal(lease.key, lease.owner, body, lease.needs),
        )
        return answer

    def _renewal(self, key: str, owner: str, body: bytes, needs: CompileNeeds) -> list[str | bytes | int]:
        """The arguments with which renew.lua and acquire.lua begin. body: empty until they ask for it."""
        times = self._lease_ms, self._ttl_ms
        packed = msgspec.msgpack.encode(needs)
        return [key, owner, *times, self._keys.wake, self._abandon_ms, body, packed]

    async def progress(self, lease: Lease, stage: compiles.Stage, detail: str) -> bool:
        """Appends an event; false when the lease is not ours any more."""
        answer = await self._scripts.progress(
            keys=self._keys.compile_keys(lease.key),
            args=[lease.key, lease.token, self._ttl_ms, self._keys.wake, stage, detail],
        )
        return bool(answer)

    async def fail(
        self, lease: Lease, error: RelayError, *, remember_seconds: float, growing: bool = False
    ) -> bool:
        """Ends the compile with an error; false when the lease is not ours any more.

        growing: the error is remembered for twice as long each time in a row, up to an hour.
        """
        body = codec.to_json(compiles.ErrorBody(error.code, error.message, error.advice))
        remember_ms = int(remember_seconds * 1000)
        answer = await self._scripts.fail(
            keys=self._keys.compile_keys(lease.key, lease.needs.unkeyed),
            args=[
                *(lease.key, lease.token, self._ttl_ms, self._keys.wake, body, error.message, remember_ms),
                _LONGEST_MEMORY_MS if growing else 0,
            ],
        )
        return bool(answer)

    async def charge(self, seconds: float) -> None:
        """Counts the seconds that a worker spent on this namespace's compiles, whatever the result."""
        period_ms = int(self._settings.quota_period_seconds * 1000)
        await self._scripts.charge(
            keys=[self._keys.spent, self._keys.stats], args=[f"{seconds:.6f}", period_ms]
        )

    async def release(self, lease: Lease, *, killed: bool = False) -> None:
        """Gives the lease back unfinished, so that a dispatcher takes it at once. killed: its worker has died of it."""
        await self._scripts.release(
            keys=self._keys.compile_keys(lease.key),
            args=[lease.key, lease.token, self._keys.wake, self._ttl_ms, COMPILES_WAIT, int(killed)],
        )
