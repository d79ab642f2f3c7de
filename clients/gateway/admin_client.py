"""An administrator's calls to a gateway: tokens, namespaces, keys, audit log, cache and tuning winners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import asdict

from ...compiler.api import admin
from ...compiler.api.now import Now
from ...compiler.api.tuning.database import TuningsImported, TuningsReply, TuningsRequest
from ...compiler.artifact import manifest
from ...compiler.tuning.records import TuningEntry, entry_sort_key
from .connection import HttpApi, decode

_ALL_SECONDS = 600.0
_PAGE = 1000
_TUNINGS = 200
"""Entries of one page or request; an entry has about 1 KiB."""


class AdminClient(HttpApi):
    """One gateway's administration."""

    def now(self) -> Now:
        return self._call("GET", "/now", Now)

    def create_token(self, request: admin.TokenRequest) -> admin.TokenReply:
        return self._call("POST", "/v1/tokens", admin.TokenReply, request)

    def tokens(self) -> list[admin.TokenRecord]:
        return self._call("GET", "/v1/tokens", list[admin.TokenRecord])

    def revoke_token(self, token_id: str) -> admin.TokenRecord:
        """Raises NotFound."""
        return self._call("DELETE", f"/v1/tokens/{token_id}", admin.TokenRecord)

    def namespaces(self) -> list[admin.NamespaceReply]:
        """The namespaces that the token may see."""
        return self._call("GET", "/v1/namespaces", list[admin.NamespaceReply])

    def namespace(self, name: str) -> admin.NamespaceReply:
        """Raises NotFound, Forbidden."""
        return self._call("GET", f"/v1/namespaces/{name}", admin.NamespaceReply)

    def set_quota(self, name: str, quota: dict[str, float | None]) -> admin.NamespaceReply:
        """Change the limits in `quota` (fields of Quota). Creates the namespace if it does not exist."""
        return self._call("PATCH", f"/v1/namespaces/{name}", admin.NamespaceReply, quota)

    def remove_namespace(self, name: str) -> admin.NamespaceRemoval:
        """Delete a part of it; to be repeated until its state is `done`. Raises NotFound, Forbidden."""
        return self._call("DELETE", f"/v1/namespaces/{name}", admin.NamespaceRemoval)

    def keys(self) -> admin.KeysReply:
        return self._call("GET", "/v1/keys", admin.KeysReply)

    def rotate_key(self, overlap_seconds: int | None) -> admin.KeysReply:
        """overlap_seconds: how long signatures of the last key stay valid; None: for ever."""
        return self._call("POST", "/v1/keys", admin.KeysReply, {"overlap_seconds": overlap_seconds})

    def revoke_key(self, key_id: str) -> admin.KeysReply:
        """Raises NotFound; MalformedRequest if it is revoked already."""
        return self._call("DELETE", f"/v1/keys/{key_id}", admin.KeysReply)

    def disown(self) -> admin.KeysReply:
        """Make all earlier signatures invalid."""
        return self._call("POST", "/v1/keys/epoch", admin.KeysReply)

    def audit(self, limit: int) -> list[admin.AuditEntry]:
        """The newest `limit` entries of the audit log, newest first."""
        found: list[admin.AuditEntry] = []
        before = ""
        while True:
            wanted = min(limit - len(found), _PAGE)
            page = self._call("GET", f"/v1/audit?before={before}&limit={wanted}", admin.AuditReply)
            found += page.entries
            before = page.next
            if not before or len(found) >= limit:
                return found

    def cache_entries(self) -> list[admin.CacheEntry]:
        """All artifacts, the last used first."""
        pages = self._pages(f"/v1/cache?limit={_PAGE}", admin.CacheReply)
        found = {entry.key: entry for page in pages for entry in page.entries}
        return sorted(found.values(), key=lambda entry: entry.used, reverse=True)

    def cached(self, key: str) -> admin.ArtifactReply:
        """Raises NotFound."""
        return self._call("GET", f"/v1/cache/{key}", admin.ArtifactReply)

    def pin(self, key: str, *, pinned: bool) -> admin.CacheEntry:
        """Raises NotFound."""
        return self._call("PUT" if pinned else "DELETE", f"/v1/cache/{key}/pin", admin.CacheEntry)

    def remove(self, key: str) -> admin.CacheEntry:
        """Raises NotFound."""
        return self._call("DELETE", f"/v1/cache/{key}", admin.CacheEntry)

    def collect(self) -> admin.CollectReply:
        """Trim and sweep. Takes as long as listing the blob store."""
        return self._call("POST", "/v1/cache/gc", admin.CollectReply, seconds=_ALL_SECONDS)

    def reindex(self, part: int) -> admin.ReindexReply:
        """Offer again what the store holds of one of REINDEX_PARTS; the last one ends it."""
        return self._call("POST", f"/v1/cache/reindex?part={part}", admin.ReindexReply, seconds=_ALL_SECONDS)

    def tunings(self) -> list[TuningEntry]:
        """All tuning winners, sorted."""
        pages = self._pages(f"/v1/tunings?limit={_TUNINGS}", TuningsReply)
        found = {entry_sort_key(entry): entry for page in pages for entry in page.entries}
        return [found[key] for key in sorted(found)]

    def import_tunings(self, entries: Sequence[TuningEntry], *, replace: bool) -> TuningsImported:
        """How many of `entries` were new, known, or replaced another. Sent in parts; after an error some are imported,
        and importing all again is harmless."""
        counts: Counter[str] = Counter()
        for start in range(0, len(entries), _TUNINGS):
            body = TuningsRequest(list(entries[start : start + _TUNINGS]), replace)
            counts.update(asdict(self._call("POST", "/v1/tunings", TuningsImported, body)))
        return TuningsImported(**counts)

    def export(self, key: str) -> bytes:
        """The artifact's signed bytes. Raises NotFound."""
        limit = self._settings.max_response_bytes
        return self._send("GET", f"/v1/artifacts/{key}", seconds=_ALL_SECONDS, limit=limit)

    def import_artifact(self, data: bytes) -> admin.ImportReply:
        """Raises MalformedRequest if it is not signed by a key that the service trusts."""
        body = self._send("POST", "/v1/cache", data, manifest.ARTIFACT_MEDIA_TYPE, seconds=_ALL_SECONDS)
        return decode(body, admin.ImportReply)
