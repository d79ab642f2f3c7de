"""Stages 5 and 9: the cache looks up and publishes artifacts; their index is in Redis, their bytes in a BlobStore.

The blob is written before the index offers it, and deleted after the index has forgotten it, so that an entry that
is found normally has its bytes. If they are lost or damaged all the same, or not signed by a trusted key, the entry is
quarantined and the key is a miss again. Publishing is one Lua script: the first artifact of a key wins.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from functools import partial
from typing import Literal

import structlog
from msgspec import Struct

from ...compiler.api import lowered
from ...compiler.artifact import container
from ...compiler.artifact.container import ArtifactFile
from ...compiler.artifact.manifest import Manifest
from ...compiler.artifact.programs import shared
from ...compiler.artifact.programs.shared import ProgramUpload
from ...compiler.artifact.signing import Statement, Trust
from ...compiler.errors import ArtifactError, Forbidden, MalformedRequest, SignatureError, Unavailable
from ..access.audit import AuditEvent, AuditLog
from ..access.tokens import Grant
from ..base.metrics import GatewayMetrics
from ..base.settings import ServiceSettings
from ..signing.trusted_keys import TrustedKeys
from ..storage.blobs import BlobStore, StorageTier
from ..storage.byte_cache import ByteCache
from ..storage.digests import DamagedStream, checked, sha256
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import DEFAULT_NAMESPACE, Keys
from ..storage.redis.retry import redis_errors_logged
from ..storage.redis.scripts import Scripts
from .components import EntryComponents
from .found_artifact import GONE, FoundArtifact, read_head
from .use_counts import UseCounts

_EVICT_BATCH = 16
"""Entries for one call of evict.lua, so that Redis is soon free for others."""
_REMEMBERED = 8192
_EVIDENCE_MS = 3_600_000
_KEY = re.compile("[0-9a-f]{64}")
_IMPORT = "import"
"""What publish.lua takes in place of a lease."""
_DAMAGED = "its bytes are not those of its digest"
_BAD_SIZE = "its index entry has no size"
_PUTS = 2
"""A restart of Redis can fall between an artifact's write and its publication, once."""

log = structlog.get_logger(__name__)

LookupUse = Literal["hit", "fetch"]
"""What a lookup counts as: an answer to a request for a compile, or a plain download."""


class _Use(Struct, frozen=True):
    """A lookup that found something. seconds: of its compile."""

    use: LookupUse
    size: int
    seconds: float

    def sums(self, times: int = 1) -> dict[str, float]:
        """What it adds to the counters."""
        served = {"bytes_served": times * self.size}
        if self.use == "fetch":
            return {"fetches": times, **served}
        return {"requests": times, "hits": times, "seconds_saved": times * self.seconds, **served}


class _Verified(Struct, frozen=True):
    """An artifact whose signature was checked. whole: its members too."""

    digest: str
    whole: bool
    statement: Statement


class Offer(Struct, frozen=True):
    """A signed artifact on its way into the cache. `seconds`: what its compile took on a worker."""

    key: str
    digest: str
    data: ArtifactFile
    seconds: float
    components: dict[str, str]
    worker: str = ""
    signer: str = ""
    """Id of the key that signed it first."""
    searched: int = 0
    """Tuning problems that its compile says it measured, and `recalled`: that it knew."""
    recalled: int = 0
    unverified: bool = False
    """Whether its worker compared nothing with eager; the manifest says why."""
    unkeyed: str = ""
    """The part of the compiled request that is not in its key (CompileNeeds)."""


async def make_offer(key: str, data: ArtifactFile, components: dict[str, str]) -> Offer:
    """An offer of a signed artifact, with what its manifest says. Raises ArtifactError."""
    manifest, signed = container.read_manifest(data), container.statements(data)[-1]
    return Offer(
        key=key,
        digest=await sha256(data),
        data=data,
        seconds=sum(seconds for _, seconds in manifest.stages),
        components=components,
        worker=manifest.worker,
        signer=signed.origin or signed.key_id,
        searched=manifest.searched,
        recalled=manifest.recalled,
        unverified=manifest.verification.status == "skipped"
        and all(member.name != lowered.MEMBER for member in manifest.members),
    )


class ArtifactCache:
    def __init__(
        self,
        redis: RedisClient,
        keys: Keys,
        scripts: Scripts,
        blobs: BlobStore,
        memory: ByteCache,
        uses: UseCounts,
        metrics: GatewayMetrics,
        audit: AuditLog,
        keyring: TrustedKeys,
        components: EntryComponents,
        settings: ServiceSettings,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts
        self._blobs = blobs
        self._memory = memory
        self._uses = uses
        self._metrics = metrics
        self._audit = audit
        self._keyring = keyring
        self._components = components
        self._verified: OrderedDict[str, _Verified] = OrderedDict()
        """What this process has verified, by key."""
        self._settings = settings

    async def lookup(self, key: str, use: LookupUse, *, known: Collection[str] = ()) -> FoundArtifact | None:
        """The artifact of `key`, signature checked, its use counted; None when there is none. The digest is checked
        too, of a stream while it is sent. known: digests of what the caller has; such an artifact comes without bytes,
        if this process has verified it before. Raises Unavailable, RedisError."""
        keys, verified = self._keys, self._verified.get(key)
        have = verified.digest if verified is not None else ""
        held = self._memory.find(have) if have else None
        answer = await self._scripts.lookup(
            keys=[keys.index(key)], args=[keys.blob_prefix, have if held else ""]
        )
        if answer is None:
            return None
        digest, place, seconds = answer[0].decode(), answer[2], float(answer[3])
        try:
            size = int(answer[1])
        except (TypeError, ValueError):  # missing, or no number
            await self._quarantine(key, digest, _BAD_SIZE)
            return None
        served = _Use(use, size, seconds)
        try:
            if digest in known and self._vouched_for(key, digest):
                found, served = FoundArtifact(key, digest, size), _Use(use, 0, seconds)
            elif place != b"redis":
                found = await self._from_store(key, digest, served)
            elif held is not None and digest == have:
                await self._check(key, digest, data := await held.read())
                found = FoundArtifact(key, digest, size, data, held)
            else:
                data = await self._check_bytes(key, digest, size, answer[4])
                # kept here, so that Redis need not send and hash it for the next hit
                held = self._memory.get(digest, size, partial(_returned, data))
                found = FoundArtifact(key, digest, size, data, held)
        except (ArtifactError, SignatureError) as error:
            await self._quarantine(key, digest, error.message)
            return None
        self._uses.used(keys.namespace, key)
        self._uses.count(keys.namespace, served.sums())
        return found

    async def manifest(self, artifact: FoundArtifact) -> Manifest:
        """Raises ArtifactError, Unavailable."""
        head = artifact.data or await read_head(self._blobs, artifact.key, artifact.digest)
        return await asyncio.to_thread(container.read_manifest, head)

    async def _from_store(self, key: str, digest: str, served: _Use) -> FoundArtifact:
        """Raises ArtifactError, SignatureError, Unavailable."""
        size = served.size
        held = self._memory.get(digest, size, partial(self._read, key, digest, size))
        if held is not None:
            data = await held.read()
            await self._check(key, digest, data)
            return FoundArtifact(key, digest, size, data, held)
        stream = await self._blobs.stream(key, digest)
        if stream is None:
            raise ArtifactError(GONE)
        await self._check_head(key, digest, size)
        return FoundArtifact(key, digest, size, stream=self._streamed(key, digest, served, stream))

    async def _read(self, key: str, digest: str, size: int) -> bytes:
        data = await self._blobs.get(key, digest)
        return await self._check_bytes(key, digest, size, data)

    async def _streamed(
        self, key: str, digest: str, served: _Use, stream: AsyncGenerator[bytes]
    ) -> AsyncGenerator[bytes]:
        try:
            async for piece in checked(stream, digest):
                yield piece
        except DamagedStream:
            self._uses.count(self._keys.namespace, served.sums(times=-1))
            await self._quarantine(key, digest, _DAMAGED)
            raise

    async def _quarantine(self, key: str, digest: str, refusal: str) -> None:
        """Removes the entry from the index, so that the next request compiles it again. Its bytes stay for an hour or
        more, for inspection: Redis lets them expire, and the store's are swept."""
        log.error("artifact_quarantined", key=key, digest=digest, reason=refusal)
        self._metrics.damaged_blobs.inc()
        event = AuditEvent(action="quarantined", key=key, digest=digest, detail=refusal)
        await self._scripts.quarantine(
            keys=self._keys.entry_keys(key),
            args=[
                key,
                self._audit.entries,
                self._keys.blob_prefix,
                digest,
                _EVIDENCE_MS,
                *event.fields(),
            ],
        )

    async def _check_bytes(self, key: str, digest: str, size: int, data: bytes | None) -> bytes:
        """The bytes, if they are those of the index and may be served. Redis and the store are not trusted. Raises
        ArtifactError, SignatureError."""
        if data is None:
            raise ArtifactError(GONE)
        if len(data) != size or await sha256(data) != digest:
            raise ArtifactError(_DAMAGED)
        await self._check(key, digest, data)
        return data

    async def _check(self, key: str, digest: str, data: bytes) -> None:
        """Raises ArtifactError, SignatureError if these bytes must not be served for `key`."""

        async def verify(trust: Trust) -> Statement:
            return (await asyncio.to_thread(container.check, data, trust, key=key))[1]

        await self._check_once(key, digest, verify, whole=True)

    async def _check_head(self, key: str, digest: str, size: int) -> None:
        """The same as `_check`, without the members: the signed manifest has their digests, for the client to check."""

        async def verify(trust: Trust) -> Statement:
            head = await read_head(self._blobs, key, digest)
            return await asyncio.to_thread(container.check_head, head, size, trust, key=key)

        await self._check_once(key, digest, verify, whole=False)

    def _vouched_for(self, key: str, digest: str) -> bool:
        """Whether this process has verified the artifact. Raises SignatureError if its signer is trusted no more."""
        known = self._verified.get(key)
        if known is None or known.digest != digest:
            return False
        self._keyring.trust(self._keys.namespace).key_for(known.statement)
        self._check_origin(known.statement)
        return True

    async def _check_once(
        self, key: str, digest: str, verify: Callable[[Trust], Awaitable[Statement]], *, whole: bool
    ) -> None:
        """Verifies the artifact, `whole` or its head, unless that was done before. Whether its signer is still trusted
        is checked each time. Raises ArtifactError, SignatureError."""
        trust = self._keyring.trust(self._keys.namespace)
        known = self._verified.get(key)
        if known is not None and known.digest == digest and known.whole >= whole:
            trust.key_for(known.statement)
        else:
            known = self._verified[key] = _Verified(digest, whole, await verify(trust))
        self._verified.move_to_end(key)
        if len(self._verified) > _REMEMBERED:
            self._verified.popitem(last=False)
        self._check_origin(known.statement)

    def _check_origin(self, statement: Statement) -> None:
        """Raises SignatureError."""
        if statement.origin and not self._keyring.vouches_for(statement.origin):
            raise SignatureError(
                f"it was imported because key {statement.origin!r} had signed it, which is trusted no more"
            )

    async def import_artifact(
        self, data: ArtifactFile, *, by: Grant
    ) -> tuple[str, Literal["imported", "exists"]]:
        """Publishes an artifact that was signed elsewhere; returns its key, and whether it was new.

        It gets this installation's own signature, which names the accepted one as its origin and is all that clients
        check. Raises MalformedRequest unless a key that this service trusts signed it; Forbidden for a program, unless
        the token may give programs; Unavailable, RedisError.
        """
        try:
            key, signed = await self._keyring.in_thread(self._countersigned, data, by)
            offer = await make_offer(key, signed, {})  # nobody signed the components
        except (ArtifactError, SignatureError) as error:
            raise MalformedRequest(
                f"refused: {error.message}",
                hint="To take another site's artifacts, add its key to TORCHRELAY_SERVICE_TRUSTED_PUBLIC_KEYS",
            ) from None
        if await self._redis.exists(self._keys.index(key)):
            return key, "exists"
        event = _audit_event("imported", offer, name=by.name, token=by.id)
        return key, "imported" if await self._put(_IMPORT, offer, event) else "exists"

    async def add_program(
        self, key: str, upload: ProgramUpload, *, by: Grant
    ) -> Literal["stored", "same", "taken"]:
        """Sign a program that a client brought, and publish it, unless there is one. Raises Unavailable, RedisError."""
        standing = await self.lookup(key, "fetch")
        if standing is not None:
            return "same" if shared.same_program(await self.manifest(standing), upload) else "taken"
        packed = await asyncio.to_thread(shared.pack, upload, key, by.id)
        data = await self._keyring.in_thread(
            self._keyring.sign, packed, key=key, namespace=self._keys.namespace
        )
        offer = await make_offer(key, data, {})
        event = _audit_event("program_stored", offer, name=by.name, token=by.id)
        return "stored" if await self._put(_IMPORT, offer, event) else "taken"

    def _countersigned(self, data: ArtifactFile, by: Grant) -> tuple[str, ArtifactFile]:
        """The artifact's key, and the artifact as it is served here. Raises ArtifactError, SignatureError,
        Forbidden."""
        said = container.read_manifest(data)
        key = said.key
        if not _KEY.fullmatch(key):
            raise ArtifactError("the artifact's key is none")
        _, accepted = container.check(data, self._keyring.import_trust(), key=key)
        if shared.holds_program(said) and not by.programs:
            raise Forbidden(
                f"it is a program, and the token of {by.name!r} may not give programs to others",
                hint="Ask an administrator for a token with --allow-programs",
            )
        namespace = self._keys.namespace
        if accepted.key_id not in self._keyring.trust(namespace).keys or accepted.namespace != namespace:
            head = self._keyring.signed_head(data, key=key, namespace=namespace, origin=accepted.key_id)
            return key, container.Resigned(head, data)
        return key, data

    async def publish(self, lease_token: str, offer: Offer) -> bool:
        """Publishes an artifact under a lease; true once the index holds exactly this one.

        False: the lease is another's by now, or another artifact was first; this one is deleted again.
        Raises BlobStoreDown, Unavailable (blob store) and RedisError; all leave nothing half-published.
        """
        return await self._put(lease_token, offer, _audit_event("published", offer))

    async def _put(self, lease_token: str, offer: Offer, event: AuditEvent) -> bool:
        for _ in range(_PUTS):
            tier = await self._blobs.put(offer.key, offer.digest, offer.data)
            answer = await self._offer(lease_token, offer, tier, event)
            if answer == b"published":
                if offer.components:
                    with redis_errors_logged("artifact_not_described", key=offer.key):
                        await self._components.put(offer.key, offer.components)
                return True
            if answer != b"blobless":
                await self._blobs.delete(offer.key, offer.digest, tier)
                return False
        raise Unavailable("Redis lost the artifact between its write and its publication")

    async def _offer(self, lease_token: str, offer: Offer, tier: StorageTier, event: AuditEvent) -> bytes:
        keys, key = self._keys, offer.key
        answer = await self._scripts.publish(
            keys=[*keys.entry_keys(key), *keys.compile_keys(key, offer.unkeyed)],
            args=[
                key,
                self._audit.entries,
                keys.blob(offer.digest),
                lease_token,
                offer.digest,
                len(offer.data),
                tier,
                keys.namespace,
                f"{offer.seconds:.6f}",
                int(self._settings.progress_ttl_seconds * 1000),
                keys.wake,
                offer.searched,
                offer.recalled,
                int(offer.unverified),
                *event.fields(),
            ],
        )
        outcome: bytes = answer[0]
        return outcome

    async def trim(self) -> int:
        """Evicts the namespace's least recently used artifacts until it is within its quota. Then evicts those of the
        largest namespace until the whole cache is within its limit. Returns how many."""
        await self._uses.write()  # by their last use, as this process knows it
        gone = await self._evict(self._keys.namespace, self._settings.namespace_bytes)
        return gone + await self._evict("", self._settings.cache_limit_bytes)

    async def _evict(self, whose: str, limit: int) -> int:
        keys, gone = self._keys, 0
        while True:
            more, *flat = await self._scripts.evict(
                keys=[keys.namespaces, *keys.sum_keys],
                args=[keys.installation, DEFAULT_NAMESPACE, whose, limit, _EVICT_BATCH, keys.namespace],
            )
            for i in range(0, len(flat), 4):
                namespace, key, digest, place = (part.decode() for part in flat[i : i + 4])
                if place != "redis":  # those went with their entry
                    await self._blobs.of(namespace).discard(key, digest)
                log.info("evicted", namespace=namespace, key=key)
            gone += len(flat) // 4
            if not more:
                return gone

    async def reindex(self, part: int, *, by: Grant) -> int:
        """Offers again what the store holds of keys whose first byte is `part`, if it is whole and signed by a trusted
        key. Returns how many are new. Raises Unavailable, RedisError."""
        indexed = 0
        for key, digest in await self._blobs.stored(f"{part:02x}"):
            if await self._redis.exists(self._keys.index(key)):
                continue
            data = await self._blobs.get(key, digest)
            if data is None or await sha256(data) != digest:
                continue
            try:
                await self._check(key, digest, data)
            except (ArtifactError, SignatureError) as error:
                log.warning("artifact_not_reindexed", key=key, digest=digest, reason=error.message)
                continue
            offer = await make_offer(key, data, {})
            event = _audit_event("imported", offer, name=by.name, token=by.id, detail="from the blob store")
            indexed += await self._offer(_IMPORT, offer, "store", event) == b"published"
        return indexed

    async def sweep(self) -> int:
        """Delete blobs that a crash left unpublished; returns how many. Raises Unavailable, RedisError."""
        return await self._blobs.sweep()


async def _returned(data: bytes) -> bytes:
    return data


def _audit_event(
    action: Literal["published", "imported", "program_stored"], offer: Offer, **by: str
) -> AuditEvent:
    return AuditEvent(
        action=action,
        key=offer.key,
        digest=offer.digest,
        worker=offer.worker,
        signer=offer.signer,
        **by,
    )
