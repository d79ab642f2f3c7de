"""What a gateway tells administrators: tokens, artifacts, namespaces, keys and the audit log, as structs.

wire.py has the messages of a compile. Times are seconds since 1970, UTC, unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from . import tune_kernels, wire
from .trust_document import ListedKey
from .tuning import Entry, Failure, Problem, Text, Timing

Role = Literal["read", "compile", "tune", "train", "admin"]
"""read: artifacts, progress, stats; every other role includes it. compile: ask for compiles. tune, train: ask
for tuning and training jobs. admin: everything."""
ROLES: tuple[Role, ...] = get_args(Role)

_WHOLE = (1 << 53) - 1
"""The service's scripts count in doubles."""
_YEARS_10 = 10 * 366 * 86400

Count = Annotated[int, Meta(ge=0, le=_WHOLE)]
Amount = Annotated[float, Meta(ge=0, le=_WHOLE)]


# --- tokens ----------------------------------------------------------------------------------------------


class TokenRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tokens`. `expires_seconds`: the token's life from now; null: it does not expire."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9._@-]{1,64}$")]
    roles: Annotated[frozenset[Role], Meta(min_length=1)]
    expires_seconds: Annotated[int, Meta(ge=1, le=_YEARS_10)] | None = None
    namespace: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,62}|\*)?$")] = ""
    """'': the administrator's own; `*`: all of them, which only a token for all may give."""
    rate: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    """Requests a second; null: as the settings say; 0: no limit."""
    allow_source: bool = False
    """Whether graphs with source that runs at compile time (user-written Triton kernels) are compiled for it."""


class TokenRecord(Struct, frozen=True, kw_only=True):
    """A token, without its secret."""

    id: str
    """Names the token where it must not be shown; opens nothing."""
    name: str
    roles: frozenset[Role]
    namespace: str = "default"
    """Or `*`: all of them."""
    created: int
    rate: float | None = None
    """Requests a second; None: as the service's settings say; 0: no limit."""
    expires: int | None = None
    revoked: int | None = None
    allow_source: bool = False
    """It may send source that runs at compile time."""

    def over(self, now: float) -> int | None:
        """When it stopped opening anything; None while it does."""
        ends = [end for end in (self.expires, self.revoked) if end is not None and end <= now]
        return min(ends, default=None)


class TokenReply(Struct, frozen=True):
    """Answer of `POST /v1/tokens`. `token` is shown this once: the service keeps only its digest."""

    token: str
    record: TokenRecord


# --- the cache -------------------------------------------------------------------------------------------


class CacheEntry(Struct, frozen=True, kw_only=True):
    """An artifact that the cache offers. `seconds`: what its compile took."""

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
    """Answer of `GET /v1/cache/{key}`. `signer`: ids of the keys that signed; `manifest`: unverified, to look at;
    `components`: what the key covers."""

    entry: CacheEntry
    signer: str
    manifest: wire.Manifest
    components: dict[str, str]


class ImportReply(Struct, frozen=True):
    """Answer of `POST /v1/cache`. exists: the key had an artifact already, which stays."""

    key: str
    outcome: Literal["imported", "exists"]


class CollectReply(Struct, frozen=True):
    """Answer of `POST /v1/cache/gc`: entries evicted over a limit, stray blobs deleted."""

    evicted: int
    swept: int


# --- namespaces ------------------------------------------------------------------------------------------


class Quota(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a namespace may use. 0: no limit; null: as the settings say."""

    compiles: int | None = None
    """Distinct graphs that compile or wait for it at the same time."""
    compile_seconds: float | None = None
    """That workers spend on it in a period."""
    bytes: int | None = None
    """Of its artifacts; past it, its least recently used go."""


class QuotaChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `PATCH /v1/namespaces/{name}`: a Quota; what it does not name stays as it is."""

    compiles: Count | UnsetType | None = UNSET
    compile_seconds: Amount | UnsetType | None = UNSET
    bytes: Count | UnsetType | None = UNSET


class NamespaceReply(Struct, frozen=True, kw_only=True):
    """A namespace, in the answers of `/v1/namespaces`."""

    name: str
    own: Quota
    """What an administrator set for it."""
    quota: Quota
    """In force."""
    compiles: int
    """That run or wait now."""
    compile_seconds: float
    """Spent in this period."""
    period_ends_seconds: float
    """From now; 0: nothing was spent, and the next compile begins a period."""
    bytes: int
    artifacts: int


# --- tuning ----------------------------------------------------------------------------------------------


class TuningsReply(Struct, frozen=True):
    """Answer of `GET /v1/tunings`. `next`: the cursor of the next page; '' after the last."""

    entries: list[Entry]
    next: str


class TuningsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tunings`. `replace`: an entry takes the place of the one that stands for its problem."""

    entries: Annotated[list[Entry], Meta(min_length=1, max_length=1000)]
    replace: bool = False


class TuningsTaken(Struct, frozen=True):
    """Answer of `POST /v1/tunings`: entries for problems that had none; that stand already, and were left; that took
    another's place."""

    new: int = 0
    exists: int = 0
    replaced: int = 0


# --- batch tuning ----------------------------------------------------------------------------------------

TUNE_ITEMS = 4096
"""Problems, graphs and kernels of one batch job."""
TUNE_ID = "^[0-9a-f]{16}$"

ItemState = Literal["waiting", "searching", "done", "known", "failed", "skipped"]
"""known: others had found it. skipped: the job's budget was over before, or it was cancelled."""
TuneState = Literal["waiting", "running", "done", "cancelled"]
"""done: every item is; some may have failed. Only those of cancelled and done jobs can be resumed."""
ENDED: frozenset[str] = frozenset({"done", "known", "failed", "skipped"})
"""States of an item of which nothing more comes."""

Line = Annotated[int, Meta(ge=0, le=1 << 31)]
Space = Literal["default", "exhaustive"]
_Seconds = Annotated[float, Meta(ge=0, le=_YEARS_10)]


class OperatorItem(Struct, frozen=True, forbid_unknown_fields=True, tag="operator"):
    """An operator on operands of a user's choice; its settings are completed where it is searched. `line`: of the
    file that it comes from; 0: none, the service added it. `ceiling`: it measures what the device can do at most."""

    line: Line
    problem: Problem
    space: Space = "default"
    ceiling: bool = False


class GraphItem(Struct, frozen=True, forbid_unknown_fields=True, tag="graph"):
    """A captured graph, by the key of its request: sent before (`POST /v1/tunes/graphs`), or asked for lately. `name`:
    what to call it beside its key."""

    line: Line
    key: wire.Digest
    mode: Literal["", "max-autotune", "max-autotune-no-cudagraphs"] = ""
    """'': as it was captured if it tunes, else max-autotune-no-cudagraphs."""
    name: Text = ""


class KernelItem(Struct, frozen=True, forbid_unknown_fields=True, tag="kernel"):
    """A user-written Triton kernel on inputs of a user's choice; `name`: what to call it."""

    line: Line
    name: Text
    kernel: tune_kernels.Kernel


TuneItem = OperatorItem | GraphItem | KernelItem


class Budget(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a job may spend; once it is spent, no search begins. 0: no limit."""

    seconds: _Seconds = 0.0
    """Of searching, on all devices together."""
    trials: Count = 0
    """Candidates that are run."""
    samples: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Of one candidate; 0: as usual."""


class TuneRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tunes`.

    device: a GPU by name, or `cpu`; '': what its first graph is for, or the one kind of GPU that the workers have, or a
    CPU if they have none. torch: the workers' version, where they have several. threads: of a CPU's kernels. file: what
    errors and reports call the file that the lines are of. id: of the job, if whoever begins it chooses one: then it is
    begun once, however often this is sent.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    items: Annotated[list[TuneItem], Meta(min_length=1, max_length=TUNE_ITEMS)]
    device: Annotated[str, Meta(max_length=200)] = ""
    torch: Annotated[str, Meta(max_length=100)] = ""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    budget: Budget = Budget()
    file: Annotated[str, Meta(max_length=300)] = ""
    lines: dict[Literal["device", "torch", "threads"], Line] = {}
    """Of those fields, in the file."""
    id: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$", max_length=16)] = ""


class TuneJob(Struct, frozen=True, kw_only=True):
    """A batch job, in the answers of `/v1/tunes`. `items`: how many there are in each state. `spent`: seconds of
    searching, on all devices together. `ended`: 0 until it has."""

    id: str
    name: str
    state: TuneState
    by: str
    """Name of the token that started it."""
    created: float
    ended: float = 0.0
    toolchain: wire.Toolchain
    target: wire.Target
    threads: int = 0
    budget: Budget = Budget()
    file: str = ""
    items: dict[ItemState, int] = {}
    spent: float = 0.0
    trials: int = 0
    detail: str = ""
    """Why it waits, or what stopped it."""
    sources: list[str] = []
    """Names of the user-written kernels whose source it holds."""


class TuneProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of a job and how far it is: in `GET /v1/tunes/{id}`, and the data of an `item` event.

    kind: operator, ceiling, graph or kernel. text: the problem, or what the item is called. detail: the winner, or why
    it failed, or where it is searched.
    """

    item: int
    line: int
    kind: str
    state: ItemState
    text: str
    detail: str = ""
    seconds: float = 0.0


class TunesReply(Struct, frozen=True):
    """Answer of `GET /v1/tunes`, the newest first."""

    jobs: list[TuneJob]


class TuneReply(Struct, frozen=True):
    """Answer of `GET /v1/tunes/{id}`."""

    job: TuneJob
    progress: list[TuneProgress]


class TuneResult(Struct, frozen=True, kw_only=True):
    """What a tuning job has for one of its items, or for a ceiling that it measured beside them.

    item: as the job's file describes it. line: of that file; 0: none. timings: of all candidates that ran, the
    fastest first. known: the entry stood already, and was not measured for this job. ceiling: a copy, or a large
    matrix product, that says what the device can do. graphs: keys that have the problem, and how often each has it.
    """

    item: str
    line: int = 0
    entry: Entry
    timings: list[Timing] = []
    failures: list[Failure] = []
    known: bool = False
    ceiling: bool = False
    graphs: list[tuple[str, int]] = []


class TuneResultsReply(Struct, frozen=True):
    """Answer of `GET /v1/tunes/{id}/results`. `next`: the cursor of the next page; '' after the last."""

    results: list[TuneResult]
    next: str


class GraphKept(Struct, frozen=True):
    """Answer of `POST /v1/tunes/graphs`: the key of a request that jobs may now name."""

    key: str


# --- signing keys ----------------------------------------------------------------------------------------


class KeysReply(Struct, frozen=True):
    """Answer of `/v1/keys`. `current` signs now. `epoch`: what was signed in an earlier one counts no longer."""

    current: str
    serial: int
    epoch: int
    keys: list[ListedKey]
    revoked: list[str]


# --- the audit log ---------------------------------------------------------------------------------------


class AuditEntry(Struct, frozen=True, kw_only=True):
    """Who (`name`, and `token`'s public id) did what to which key. `id` orders entries; `at` by Redis' clock."""

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
