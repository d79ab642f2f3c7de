"""Bodies of the administration endpoints: tokens, artifacts, namespaces, keys and the audit log.

Times are seconds since 1970, UTC, unless a name says otherwise."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from ..artifact import manifest as artifact_manifest
from ..artifact.trust_document import ListedKey
from ..request.schema import Level
from .compiles import TEN_YEARS_SECONDS, Amount, Count
from .runs import RunSummary

Role = Literal["read", "compile", "tune", "train", "admin"]
"""read: artifacts, progress, stats; every other role includes it. compile: request compiles, send winners of libraries'
own autotuners. tune, train: start tuning and training jobs. admin: everything."""

ROLES: tuple[Role, ...] = get_args(Role)


def permissions(roles: frozenset[Role], *, source: bool, programs: bool) -> list[str]:
    """A token's roles, and what no role includes."""
    more = {"source": source, "programs": programs}
    return [*sorted(roles), *(name for name, allowed in more.items() if allowed)]


class TokenRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /v1/tokens`. expires_seconds: from now; null: never."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9._@-]{1,64}$")]
    roles: Annotated[frozenset[Role], Meta(min_length=1)]
    expires_seconds: Annotated[int, Meta(ge=1, le=TEN_YEARS_SECONDS)] | None = None
    namespace: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,62}|\*)?$")] = ""
    """'': the administrator's own; `*`: all, which only a token for all namespaces may give."""
    rate: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    """Requests per second; null: the setting's; 0: no limit."""
    allow_source: bool = False
    """It may send source that runs at compile time (user-written Triton kernels)."""
    allow_programs: bool = False
    """It may give programs to the clients of its namespace that accept them: bytecode that runs there."""


class TokenRecord(Struct, frozen=True, kw_only=True):
    """A token, without its secret."""

    id: str
    """Public; grants nothing."""
    name: str
    roles: frozenset[Role]
    namespace: str = "default"
    """`*`: all."""
    created: int
    rate: float | None = None
    """Requests per second; None: the setting's; 0: no limit."""
    expires: int | None = None
    revoked: int | None = None
    allow_source: bool = False
    """It may send source that runs at compile time."""
    allow_programs: bool = False
    """It may give programs to the clients of its namespace."""

    @property
    def permissions(self) -> list[str]:
        return permissions(self.roles, source=self.allow_source, programs=self.allow_programs)

    def over(self, now: float) -> int | None:
        """When it stopped being valid; None while it is."""
        ends = [end for end in (self.expires, self.revoked) if end is not None and end <= now]
        return min(ends, default=None)


class CallerReply(Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/whoami`: what the request's token allows, as in its TokenRecord."""

    id: str
    name: str
    namespace: str
    """The one that it acts in."""
    everywhere: bool
    """Whether it is for all namespaces."""
    permissions: list[str]
    expires: int | None = None


class TokenReply(Struct, frozen=True):
    """Answer of `POST /v1/tokens`. The service stores only the token's digest."""

    token: str
    record: TokenRecord


class CacheEntry(Struct, frozen=True, kw_only=True):
    """An artifact in the cache. seconds: its compile time."""

    key: str
    digest: str
    bytes: int
    place: str
    """redis or store."""
    created: float
    used: float
    pinned: bool
    seconds: float


class CacheReply(Struct, frozen=True):
    """Answer of `GET /v1/cache`. `next`: the cursor of the next page; '' after the last."""

    entries: list[CacheEntry]
    next: str


class ArtifactReply(Struct, frozen=True):
    """Answer of `GET /v1/cache/{key}`. signer: ids of the signing keys. manifest: not verified. components: what the
    key covers."""

    entry: CacheEntry
    signer: str
    manifest: artifact_manifest.Manifest
    components: dict[str, str]


Action = Literal["pin", "unpin", "remove"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Artifact(ArtifactReply, frozen=True):
    """Answer of `GET /artifacts/{key}`. runs: those of the latest that used it; runs_read: of how many. actions: what
    the caller may do with it."""

    runs: list[RunSummary]
    runs_read: int
    actions: list[Action]


class ArtifactList(Struct, frozen=True):
    """Answer of `GET /artifacts`: the last used first. pinned: at most 100, on the first page. following: where the
    next page begins, 0 after the last."""

    entries: list[CacheEntry]
    pinned: list[CacheEntry]
    following: int


class Listing(Struct, frozen=True):
    """Text that an artifact has of itself. name: the member with the machine code, or the part of the graph. drawable:
    `GET /artifacts/{key}/graph` has it as nodes."""

    name: str
    text: str
    drawable: bool = False


class ListedLevel(Struct, frozen=True):
    """The graph at a level. missing: why there is no listing."""

    level: Level
    listings: list[Listing]
    missing: str


class ArtifactCode(Struct, frozen=True):
    """Answer of `GET /artifacts/{key}/code`. kernels: the C++ sources of its libraries. levels: of a graph that was
    lowered to be looked at."""

    key: str
    kernels: list[Listing]
    levels: list[ListedLevel]


class ImportReply(Struct, frozen=True):
    """Answer of `POST /v1/cache`. exists: the key already had an artifact, which was not replaced."""

    key: str
    outcome: Literal["imported", "exists"]


REINDEX_PARTS = 256
"""Requests of a `cache reindex`: one for each first byte of a key."""


class ReindexReply(Struct, frozen=True):
    """Answer of `POST /v1/cache/reindex`: artifacts that the cache offers again."""

    indexed: int


class CollectReply(Struct, frozen=True):
    """Answer of `POST /v1/cache/gc`: entries evicted over a limit, stray blobs deleted."""

    evicted: int
    swept: int


class Quota(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A namespace's limits. 0: no limit; null: the setting's."""

    compiles: int | None = None
    """Graphs that compile or wait at the same time."""
    compile_seconds: float | None = None
    """Workers' time in a period."""
    bytes: int | None = None
    """The most bytes of artifacts; beyond it the least recently used ones are evicted."""


class QuotaChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `PATCH /v1/namespaces/{name}`: the fields of its Quota to change."""

    compiles: Count | UnsetType | None = UNSET
    compile_seconds: Amount | UnsetType | None = UNSET
    bytes: Count | UnsetType | None = UNSET


class NamespaceReply(Struct, frozen=True, kw_only=True):
    """A namespace, in the answers of `/v1/namespaces`."""

    name: str
    own: Quota
    """Set by an administrator."""
    quota: Quota
    """The quota in force."""
    compiles: int
    """That run or wait now."""
    compile_seconds: float
    """Spent in this period."""
    period_ends_seconds: float
    """From now; 0: the next compile begins a period."""
    bytes: int
    artifacts: int


class NamespaceRemoval(Struct, frozen=True):
    """Answer of `DELETE /v1/namespaces/{name}`, which deletes a part and is repeated until `done`. jobs, compiles: so
    many are open, and nothing is deleted, nor for so many seconds (requests), until those that began before are over;
    deleting: so many objects of the blob store were."""

    state: Literal["jobs", "compiles", "requests", "deleting", "done"]
    count: int


class KeysReply(Struct, frozen=True):
    """Answer of `/v1/keys`. current: signs now. epoch: signatures of earlier epochs are not valid."""

    current: str
    serial: int
    epoch: int
    keys: list[ListedKey]
    revoked: list[str]


class AuditEntry(Struct, frozen=True, kw_only=True):
    """Who (name, and the token's public id) did what to which key. id: orders entries. at: by Redis' clock."""

    id: str
    at: float
    namespace: str
    action: str
    name: str = ""
    token: str = ""
    key: str = ""
    digest: str = ""
    worker: str = ""
    signer: str = ""
    """Id of the key that signed."""
    detail: str = ""


class AuditReply(Struct, frozen=True):
    """Answer of `GET /v1/audit`. `next`: the `before` of the next page; '' after the last."""

    entries: list[AuditEntry]
    next: str


class Administration(Struct, frozen=True, kw_only=True):
    """Answer of `GET /administration`. keys: for the service's owner. next: the `before` of the audit log's next page;
    '' after the last."""

    tokens: list[TokenRecord]
    namespaces: list[NamespaceReply]
    keys: KeysReply | None
    entries: list[AuditEntry]
    next: str
