"""What an administrator asks of a gateway: typed calls in, the service's own records out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import httpx2
import msgspec
from msgspec import Struct

from ..compiler import wire
from ..compiler.trust_document import ListedKey
from .connection import Clock, Connection, decode
from .settings import ClientSettings

T = TypeVar("T")

_QUICK_SECONDS = 10.0
_SLOW_SECONDS = 600.0
_PAGE = 1000


class Token(Struct, frozen=True, kw_only=True):
    """A token's record; times in seconds since 1970."""

    id: str
    name: str
    roles: list[str]
    namespace: str = "default"
    """`*`: all of them."""
    created: int
    rate: float | None = None
    """Requests a second; None: as the service's settings say; 0: no limit."""
    expires: int | None = None
    revoked: int | None = None


class NewToken(Struct, frozen=True):
    """`token` is the secret, shown this once."""

    token: str
    record: Token


class AuditEntry(Struct, frozen=True, kw_only=True):
    """Who (`name`, and `token`'s public id) did what to which key; `at` in seconds since 1970."""

    id: str
    at: float
    namespace: str = "default"
    action: str
    name: str = ""
    token: str = ""
    key: str = ""
    digest: str = ""
    worker: str = ""
    signer: str = ""
    detail: str = ""


class _AuditPage(Struct, frozen=True):
    entries: list[AuditEntry]
    next: str


class CacheEntry(Struct, frozen=True, kw_only=True):
    """An artifact in the service's cache; times in seconds since 1970, `seconds` of compile."""

    key: str
    digest: str
    bytes: int
    place: str
    created: float
    used: float
    pinned: bool
    seconds: float


class Cached(Struct, frozen=True):
    """One artifact: its entry, who signed it, its manifest (unverified: to look at), what its key covers."""

    entry: CacheEntry
    signer: str
    manifest: wire.Manifest
    components: dict[str, str]


class Collected(Struct, frozen=True):
    evicted: int
    swept: int


class Imported(Struct, frozen=True):
    """`outcome`: imported, or exists (the key had an artifact already)."""

    key: str
    outcome: str


class Quota(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a namespace may use. 0: no limit; None: as the service's settings say."""

    compiles: int | None = None
    compile_seconds: float | None = None
    bytes: int | None = None


class Namespace(Struct, frozen=True, kw_only=True):
    """A team: its own quota, the one in force, and what it uses now."""

    name: str
    own: Quota
    quota: Quota
    compiles: int
    compile_seconds: float
    period_ends_seconds: float
    bytes: int
    artifacts: int


class Keys(Struct, frozen=True, kw_only=True):
    """The service's signing keys; `current` signs now."""

    current: str
    serial: int
    epoch: int
    keys: list[ListedKey]
    revoked: list[str]


class _CachePage(Struct, frozen=True):
    entries: list[CacheEntry]
    next: str


class Administration:
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

    def __enter__(self) -> Administration:
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
    ) -> NewToken:
        """`namespace`: '' for the administrator's own, `*` for all. `rate`: requests a second; 0: no limit."""
        body = {
            "name": name,
            "roles": list(roles),
            "expires_seconds": expires_seconds,
            "namespace": namespace,
            "rate": rate,
        }
        return self._ask("POST", "/v1/tokens", NewToken, body)

    def tokens(self) -> list[Token]:
        return self._ask("GET", "/v1/tokens", list[Token])

    def revoke_token(self, token_id: str) -> Token:
        """Raises NotFound."""
        return self._ask("DELETE", f"/v1/tokens/{token_id}", Token)

    def namespaces(self) -> list[Namespace]:
        """Those of which the token may hear."""
        return self._ask("GET", "/v1/namespaces", list[Namespace])

    def namespace(self, name: str) -> Namespace:
        """Raises NotFound, Forbidden."""
        return self._ask("GET", f"/v1/namespaces/{name}", Namespace)

    def set_quota(self, name: str, quota: dict[str, float | None]) -> Namespace:
        """Change what `quota` names (fields of Quota), and make the namespace if it does not exist."""
        return self._ask("PATCH", f"/v1/namespaces/{name}", Namespace, quota)

    def keys(self) -> Keys:
        return self._ask("GET", "/v1/keys", Keys)

    def rotate_key(self, overlap_seconds: int | None) -> Keys:
        """None: what the last key signed counts for good."""
        return self._ask("POST", "/v1/keys", Keys, {"overlap_seconds": overlap_seconds})

    def revoke_key(self, key_id: str) -> Keys:
        """Raises NotFound, MalformedRequest for one that is revoked already."""
        return self._ask("DELETE", f"/v1/keys/{key_id}", Keys)

    def disown(self) -> Keys:
        """Nothing that was signed until now counts any more."""
        return self._ask("POST", "/v1/keys/epoch", Keys)

    def audit(self, limit: int) -> list[AuditEntry]:
        """The newest `limit` entries of the audit log, newest first."""
        found: list[AuditEntry] = []
        before = ""
        while True:
            wanted = min(limit - len(found), _PAGE)
            page = self._ask("GET", f"/v1/audit?before={before}&limit={wanted}", _AuditPage)
            found += page.entries
            before = page.next
            if not before or len(found) >= limit:
                return found

    def cache_entries(self) -> list[CacheEntry]:
        """All of the cache, the last used first."""
        found: dict[str, CacheEntry] = {}
        cursor = ""
        while True:
            page = self._ask("GET", f"/v1/cache?cursor={cursor}&limit={_PAGE}", _CachePage)
            found |= {entry.key: entry for entry in page.entries}
            cursor = page.next
            if not cursor:
                return sorted(found.values(), key=lambda entry: entry.used, reverse=True)

    def cached(self, key: str) -> Cached:
        """Raises NotFound."""
        return self._ask("GET", f"/v1/cache/{key}", Cached)

    def pin(self, key: str, *, pinned: bool) -> CacheEntry:
        """Raises NotFound."""
        return self._ask("PUT" if pinned else "DELETE", f"/v1/cache/{key}/pin", CacheEntry)

    def remove(self, key: str) -> CacheEntry:
        """Raises NotFound."""
        return self._ask("DELETE", f"/v1/cache/{key}", CacheEntry)

    def collect(self) -> Collected:
        """Trim and sweep, which takes as long as it takes to list the blob store."""
        return self._ask("POST", "/v1/cache/gc", Collected, seconds=_SLOW_SECONDS)

    def export(self, key: str) -> bytes:
        """The artifact's signed bytes. Raises NotFound."""
        limit = self._settings.max_response_bytes
        path = self._within(f"/v1/artifacts/{key}")
        return self._connection.request("GET", path, Clock(_SLOW_SECONDS), limit=limit).body

    def import_artifact(self, data: bytes) -> Imported:
        """Raises MalformedRequest when no key that the service trusts has signed it."""
        headers = {"Content-Type": wire.ARTIFACT_MEDIA_TYPE}
        answer = self._connection.request(
            "POST", self._within("/v1/cache"), Clock(_SLOW_SECONDS), content=data, headers=headers
        )
        return decode(answer.body, Imported)

    def _ask(
        self, method: str, path: str, type: type[T], body: object = None, *, seconds: float = _QUICK_SECONDS
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        clock = Clock(seconds)
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
