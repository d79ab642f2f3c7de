"""What an administrator asks of a gateway: typed calls in, the service's own records out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import httpx2
import msgspec
from msgspec.structs import asdict

from ...compiler.api.admin import (
    ArtifactReply,
    AuditEntry,
    AuditReply,
    CacheEntry,
    CacheReply,
    CollectReply,
    ImportReply,
    KeysReply,
    NamespaceReply,
    TokenRecord,
    TokenReply,
)
from ...compiler.api.tuning.database import TuningsImported, TuningsReply, TuningsRequest
from ...compiler.artifact import manifest
from ...compiler.tuning.records import TuningEntry, entry_sort_key
from ..settings import ClientSettings
from .connection import Connection, decode
from .deadline import Deadline

T = TypeVar("T")

_QUICK_SECONDS = 10.0
_SLOW_SECONDS = 600.0
_PAGE = 1000
_TUNINGS = 200
"""Entries of a page, or of a body: none has more than some KiB, and few have more than one."""


class AdminClient:
    """One gateway's administration, in `namespace` (default: the token's own). `transport` replaces the network,
    for tests."""

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx2.BaseTransport | None = None,
        *,
        namespace: str = "",
    ) -> None:
        self._namespace = namespace
        self._settings = settings
        self._connection = Connection(settings, transport)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def create_token(
        self,
        name: str,
        roles: Sequence[str],
        expires_seconds: int | None,
        *,
        namespace: str = "",
        rate: float | None = None,
        allow_source: bool = False,
    ) -> TokenReply:
        """`namespace`: '' for the administrator's own, `*` for all. `rate`: requests a second; 0: no limit.
        `allow_source`: it may have graphs with user-written kernels compiled."""
        body: dict[str, object] = {
            "name": name,
            "roles": list(roles),
            "expires_seconds": expires_seconds,
            "namespace": namespace,
            "rate": rate,
        }
        if allow_source:  # a service that does not know the permission refuses, and others as before
            body["allow_source"] = True
        return self._ask("POST", "/v1/tokens", TokenReply, body)

    def tokens(self) -> list[TokenRecord]:
        return self._ask("GET", "/v1/tokens", list[TokenRecord])

    def revoke_token(self, token_id: str) -> TokenRecord:
        """Raises NotFound."""
        return self._ask("DELETE", f"/v1/tokens/{token_id}", TokenRecord)

    def namespaces(self) -> list[NamespaceReply]:
        """Those of which the token may hear."""
        return self._ask("GET", "/v1/namespaces", list[NamespaceReply])

    def namespace(self, name: str) -> NamespaceReply:
        """Raises NotFound, Forbidden."""
        return self._ask("GET", f"/v1/namespaces/{name}", NamespaceReply)

    def set_quota(self, name: str, quota: dict[str, float | None]) -> NamespaceReply:
        """Change what `quota` names (fields of Quota), and make the namespace if it does not exist."""
        return self._ask("PATCH", f"/v1/namespaces/{name}", NamespaceReply, quota)

    def keys(self) -> KeysReply:
        return self._ask("GET", "/v1/keys", KeysReply)

    def rotate_key(self, overlap_seconds: int | None) -> KeysReply:
        """None: what the last key signed counts for good."""
        return self._ask("POST", "/v1/keys", KeysReply, {"overlap_seconds": overlap_seconds})

    def revoke_key(self, key_id: str) -> KeysReply:
        """Raises NotFound, MalformedRequest for one that is revoked already."""
        return self._ask("DELETE", f"/v1/keys/{key_id}", KeysReply)

    def disown(self) -> KeysReply:
        """Nothing that was signed until now counts any more."""
        return self._ask("POST", "/v1/keys/epoch", KeysReply)

    def audit(self, limit: int) -> list[AuditEntry]:
        """The newest `limit` entries of the audit log, newest first."""
        found: list[AuditEntry] = []
        before = ""
        while True:
            wanted = min(limit - len(found), _PAGE)
            page = self._ask("GET", f"/v1/audit?before={before}&limit={wanted}", AuditReply)
            found += page.entries
            before = page.next
            if not before or len(found) >= limit:
                return found

    def cache_entries(self) -> list[CacheEntry]:
        """All of the cache, the last used first."""
        found: dict[str, CacheEntry] = {}
        cursor = ""
        while True:
            page = self._ask("GET", f"/v1/cache?cursor={cursor}&limit={_PAGE}", CacheReply)
            found |= {entry.key: entry for entry in page.entries}
            cursor = page.next
            if not cursor:
                return sorted(found.values(), key=lambda entry: entry.used, reverse=True)

    def cached(self, key: str) -> ArtifactReply:
        """Raises NotFound."""
        return self._ask("GET", f"/v1/cache/{key}", ArtifactReply)

    def pin(self, key: str, *, pinned: bool) -> CacheEntry:
        """Raises NotFound."""
        return self._ask("PUT" if pinned else "DELETE", f"/v1/cache/{key}/pin", CacheEntry)

    def remove(self, key: str) -> CacheEntry:
        """Raises NotFound."""
        return self._ask("DELETE", f"/v1/cache/{key}", CacheEntry)

    def collect(self) -> CollectReply:
        """Trim and sweep, which takes as long as it takes to list the blob store."""
        return self._ask("POST", "/v1/cache/gc", CollectReply, seconds=_SLOW_SECONDS)

    def tunings(self) -> list[TuningEntry]:
        """All tuning winners, sorted."""
        found: dict[tuple[object, ...], TuningEntry] = {}
        cursor = ""
        while True:
            page = self._ask("GET", f"/v1/tunings?cursor={cursor}&limit={_TUNINGS}", TuningsReply)
            found |= {entry_sort_key(entry): entry for entry in page.entries}
            cursor = page.next
            if not cursor:
                return [found[key] for key in sorted(found)]

    def import_tunings(self, entries: Sequence[TuningEntry], *, replace: bool) -> TuningsImported:
        """How many of `entries` were new, stood already, or took another's place. Sent in parts: an error leaves those
        before it taken, and sending all again is harmless."""
        taken: Counter[str] = Counter()
        for start in range(0, len(entries), _TUNINGS):
            body = TuningsRequest(list(entries[start : start + _TUNINGS]), replace)
            taken.update(asdict(self._ask("POST", "/v1/tunings", TuningsImported, body)))
        return TuningsImported(**taken)

    def export(self, key: str) -> bytes:
        """The artifact's signed bytes. Raises NotFound."""
        limit = self._settings.max_response_bytes
        path = self._within(f"/v1/artifacts/{key}")
        return self._connection.request("GET", path, Deadline(_SLOW_SECONDS), limit=limit).body

    def import_artifact(self, data: bytes) -> ImportReply:
        """Raises MalformedRequest when no key that the service trusts has signed it."""
        headers = {"Content-Type": manifest.ARTIFACT_MEDIA_TYPE}
        answer = self._connection.request(
            "POST", self._within("/v1/cache"), Deadline(_SLOW_SECONDS), content=data, headers=headers
        )
        return decode(answer.body, ImportReply)

    def _ask(
        self, method: str, path: str, type: type[T], body: object = None, *, seconds: float = _QUICK_SECONDS
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        clock = Deadline(seconds)
        return decode(
            self._connection.request(
                method, self._within(path), clock, content=content, headers=headers
            ).body,
            type,
        )

    def _within(self, path: str) -> str:
        if not self._namespace:
            return path
        return f"{path}{'&' if '?' in path else '?'}namespace={self._namespace}"
