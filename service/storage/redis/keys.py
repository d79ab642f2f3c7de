"""The names of all Redis keys of an installation."""

from __future__ import annotations

from typing import Literal, get_args

JobKind = Literal["tune", "train"]

COMPILES_WAIT = "compiles"
JOBS_WAIT = "jobs"
"""What the wake channel says when a dispatcher may take a compile, or a job."""
PROTOCOL_RAISED = "protocol"
"""What it says when a newer release has begun to use Redis, and no longer works with some older ones."""

DEFAULT_NAMESPACE = "default"
"""The namespace of everything that belongs to no other."""


class JobKeys:
    """The Redis keys of one kind of jobs in a namespace.

    Parts of a tuning job, the keys of its hashes are numbers of items: `items`, JSON; `bodies`, requests of graphs and
    kernels; `progress`, TuneProgress as JSON, none of those that wait; `results`, TuneResults in MessagePack and zstd.

    Parts of a training job: `metrics`, `logs` and `history` (the rest), streams of these events alone, with the
    numbers that they have in `events`; `segments`, a hash: what of these streams went to the blob store, `<part>:<first
    number>` to the last number; `files`, a hash: name to TrainFile, JSON.
    """

    def __init__(self, prefix: str, kind: JobKind) -> None:
        self.kind = kind
        self.all = f"{prefix}{kind}s"
        """Sorted set: job by its beginning, ms."""
        self.open = f"{prefix}{kind}s_open"
        """Sorted set, as `all`: those that have not ended."""
        self._prefix = f"{prefix}{kind}:"

    def job(self, job: str) -> str:
        """Hash: the job and its progress, JSON; state, ended (ms), detail, cancelled_by (in words, until it has ended),
        source (whether its graphs may hold source); how often it was resumed, resumes; how many events there were,
        events; which of them is the first of the newer half of its stream, newer, and the bytes of that half,
        newer_bytes; what the job holds besides its events, bytes."""
        return self._prefix + job

    def part(self, job: str, part: str) -> str:
        """`events`: a stream, name and data of each event; ids are `<number>-0`, numbers from 1.
        `lease`: `owner:fence`, expires with the lease. Others: see above."""
        return f"{self._prefix}{job}:{part}"

    def notification(self, job: str) -> str:
        """What the wake channel calls a job."""
        return f"{self.kind}:{job}"


class Keys:
    """Every Redis key of one installation, as one of its namespaces sees them; `key` is a request's cache key.

    All lie under one prefix. `default` lies right there, so that an installation with one team has short names.
    """

    def __init__(self, prefix: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.installation = prefix
        self.namespace = namespace
        # shared by all namespaces
        self.tokens = f"{prefix}tokens"
        """Hash: digest of a token to its record, JSON."""
        self.namespaces = f"{prefix}namespaces"
        """Hash: name to its own quota, JSON."""
        self.deleted = f"{prefix}deleted"
        """Hash: namespace that was deleted, until someone makes it anew, to when that began, s."""
        self.inline = f"{prefix}inline"
        """Sum of the sizes of blobs that Redis itself holds."""
        self.bytes = f"{prefix}bytes"
        """Sum of `namespace_bytes`."""
        self.namespace_bytes = f"{prefix}namespace_bytes"
        """Sorted set: names of `lru` of all namespaces by the bytes of their artifacts."""
        self.described = f"{prefix}described"
        """List: `<bytes>:<name>` of what `components` names, of all namespaces, the oldest first."""
        self.described_bytes = f"{prefix}described_bytes"
        """Their sum."""
        self.saved = f"{prefix}saved"
        """Sorted set: names of `saved_request` of all namespaces by when they were saved, ms."""
        self.saved_sizes = f"{prefix}saved_sizes"
        """Hash: the same names to bytes."""
        self.saved_total = f"{prefix}saved_total"
        """Their sum."""
        self.swept = f"{prefix}sweep"
        """Which dispatcher has swept the stores and counted the sums again, lately; expires."""
        self.summed = f"{prefix}summed"
        """The sum of all namespaces' Counters, MessagePack; expires."""
        self.identity = f"{prefix}installation"
        """Hash: id, also in the blob store; since (ms) when Redis knows that store; sweeps; protocol, and the oldest
        with which all may use Redis (protocols.REDIS)."""
        self.wake = f"{prefix}wake"
        """Channel: a cache key whose events or lease changed; COMPILES_WAIT, JOBS_WAIT, PROTOCOL_RAISED."""
        self.pending = f"{prefix}pending"
        """Sorted set: open compiles of all namespaces, each by the name of its lease; since when, or from when on, a
        dispatcher may take it, ms: since it was queued, or from the end of its lease."""
        self.pending_bytes = f"{prefix}pending_bytes"
        """Hash: the name of a lease in `pending` to the bytes of its request."""
        self.pending_priorities = f"{prefix}pending_priorities"
        """Hash: the name of a lease in `pending` to its priority (single_flight.Priority), of what a job has queued."""
        self.open_jobs = f"{prefix}open_jobs"
        """Sorted set: jobs of all namespaces that have not ended, each by its key; from when on a dispatcher may take
        it, ms."""
        self.dispatchers = f"{prefix}dispatchers"
        """Sorted set: ids of live dispatchers by when they expire, ms."""
        # of this namespace alone
        prefix = prefix if namespace == DEFAULT_NAMESPACE else f"{prefix}ns:{namespace}:"
        self.prefix = prefix
        self.lru = f"{prefix}lru"
        """Sorted set: cache key by last use, ms."""
        self.pinned = f"{prefix}pinned"
        """Sorted set, as lru: what is never evicted. A key is in one of the two."""
        self.sizes = f"{prefix}sizes"
        """Hash: cache key to artifact bytes."""
        self.fence = f"{prefix}fence"
        """The highest fence given out."""
        self.active = f"{prefix}active"
        """Sorted set: keys queued or in compile by when they expire, ms: with the lease, or with what is queued. What a
        job has queued is there once it is taken."""
        self.stats = f"{prefix}stats"
        self.fallbacks = f"{prefix}fallbacks"
        """Hash: error code to the number of clients' fallbacks."""
        self.spent = f"{prefix}spent"
        """Milliseconds of compiles in this period, expires with it."""
        self.audit = f"{prefix}audit"
        """Stream: what access/audit.py's AuditEvent holds."""
        self.misses = f"{prefix}misses"
        """Sorted set: cache key by its latest miss, ms."""
        self.graphs = f"{prefix}graphs"
        """Sorted set: digest of a graph by its latest miss, ms."""
        self.miss_prefix = f"{prefix}miss:"
        self.same_graph_prefix = f"{prefix}same_graph:"
        self.scripts = f"{prefix}scripts"
        """Sorted set: script by its last run, ms."""
        self.tunings = f"{prefix}tunings"
        """Hash: digests of a place and a problem to their records.TuningEntry, MessagePack."""
        self.tuned = f"{prefix}tuned"
        """Sorted set: fields of tunings by last use, ms."""
        self.autotunes = f"{prefix}autotunes"
        """Hash: `<library>:<key>` to AutotuneEntry, MessagePack."""
        self.autotuned = f"{prefix}autotuned"
        """Sorted set: fields of autotunes by last use, ms."""
        self.runs = f"{prefix}runs"
        """Sorted set: run by when a process last told of it, ms."""
        self.run_sizes = f"{prefix}run_sizes"
        """Hash: run to the bytes of its processes' records and summaries."""
        self.run_bytes = f"{prefix}run_bytes"
        """Their sum."""
        self.jobs: dict[JobKind, JobKeys] = {kind: JobKeys(prefix, kind) for kind in get_args(JobKind)}
        self.saved_prefix = f"{prefix}saved:"
        self.orphans = f"{prefix}orphans"
        """Sorted set: path in the blob store of what nothing names, by when that was found, s; `train_orphans` too."""
        self.train_orphans = f"{prefix}train_orphans"
        self.script_prefix = f"{prefix}script:"
        self.script_sizes_prefix = f"{prefix}script_sizes:"
        self.index_prefix = f"{prefix}index:"
        self.blob_prefix = f"{prefix}blob:"

    def of(self, namespace: str) -> Keys:
        return Keys(self.installation, namespace)

    @property
    def sum_keys(self) -> list[str]:
        """The sums that evictions go by, which the scripts in lua/cache/ keep."""
        return [self.namespace_bytes, self.bytes, self.inline]

    def entry_keys(self, key: str) -> list[str]:
        """KEYS of the scripts in lua/cache/ for one entry."""
        return [
            self.index(key),
            self.lru,
            self.pinned,
            self.sizes,
            *self.sum_keys,
            self.stats,
            self.audit,
        ]

    def compile_keys(self, key: str, unkeyed: str = "") -> list[str]:
        """KEYS of the scripts in lua/lease/. unkeyed: see CompileNeeds."""
        return [
            self.index(key),
            self.lease(key),
            self.fence,
            self.active,
            self.events(key),
            self.request(key),
            self.run(key),
            self.waiters(key),
            self.failed(key, unkeyed),
            self.stats,
            self.spent,
            self.namespaces,
            self.kills(key, unkeyed),
            self.pending,
            self.pending_bytes,
            self.pending_priorities,
        ]

    def slot_keys(self, group: str) -> list[str]:
        """KEYS of lua/slots/claim_slots.lua, of one group of a Ray cluster's slots. Hash: slot to the dispatcher that
        uses it, and a `-` if it is to leave it; sorted set: dispatcher by its expiry, ms; while the third exists,
        nobody gets a slot."""
        slots = f"{self.installation}slots:{group}"
        return [slots, f"{slots}:dispatchers", f"{slots}:closed"]

    def bucket(self, token: str) -> str:
        """When the requests that the token with this digest may still make are all there again, in us."""
        return f"{self.installation}bucket:{token}"

    def page_ticket(self, digest: str) -> str:
        """A browser's token, masked by what only its ticket has (access/page_tickets.py); expires."""
        return f"{self.installation}page_ticket:{digest}"

    def tokens_named(self, name: str) -> str:
        """Set: digests of this namespace's tokens of this name, of those that expire; expires after them."""
        return f"{self.prefix}tokens:{name}"

    def index(self, key: str) -> str:
        """Hash: digest, size, place, namespace, seconds, created."""
        return self.index_prefix + key

    def components(self, key: str) -> str:
        """What the key of a published artifact was made of: JSON, zstd."""
        return f"{self.prefix}components:{key}"

    def blob(self, digest: str) -> str:
        return self.blob_prefix + digest

    def miss(self, key: str) -> str:
        """Components of a request that missed: JSON, zstd."""
        return self.miss_prefix + key

    def same_graph(self, graph: str) -> str:
        """Sorted set: cache keys of one graph by their miss, ms."""
        return self.same_graph_prefix + graph

    def script(self, script: str) -> str:
        """Sorted set: cache keys that a script used, by when and in which order."""
        return self.script_prefix + script

    def script_sizes(self, script: str) -> str:
        """Sorted set: digests of inputs' sizes that vary in a script's runs, by when that was reported, ms."""
        return self.script_sizes_prefix + script

    def hours(self, day: int) -> str:
        """Hash: what was counted in each hour of a day since 1970 (cache/usage.py); expires."""
        return f"{self.stats}:hours:{day}"

    def days(self, group: int) -> str:
        """The same of 32 days; `group`: days since 1970, divided by 32."""
        return f"{self.stats}:days:{group}"

    def run_records(self, run: str) -> str:
        """Hash: rank to its RunProcess as JSON, zstd; 0 for a process without a launcher."""
        return f"{self.prefix}run_records:{run}"

    def run_summaries(self, run: str) -> str:
        """Hash: rank to its RunSummary as JSON; `first`: that of the process that ended first."""
        return f"{self.prefix}run_summaries:{run}"

    def launch(self, digest: str) -> str:
        """The run to which processes of a launch belong that end now; expires."""
        return f"{self.prefix}launch:{digest}"

    def saved_request(self, key: str) -> str:
        """The body of a request, for tuning jobs that name it by key."""
        return self.saved_prefix + key

    def lease(self, key: str) -> str:
        """`owner:fence`, expires with the lease."""
        return f"{self.prefix}lease:{key}"

    def leased(self, lease: str) -> tuple[str, str] | None:
        """Namespace and cache key of a lease's name; None for what is none."""
        path = lease.removeprefix(self.installation).split(":")
        match path:
            case ["lease", key]:
                return DEFAULT_NAMESPACE, key
            case ["ns", namespace, "lease", key]:
                return namespace, key
        return None

    def opened_job(self, key: str) -> tuple[str, str, str] | None:
        """Kind, namespace and id of the job with this key; None for what is none."""
        path = key.removeprefix(self.installation).split(":")
        match path:
            case ["tune" | "train" as kind, job]:
                return kind, DEFAULT_NAMESPACE, job
            case ["ns", namespace, "tune" | "train" as kind, job]:
                return kind, namespace, job
        return None

    def dispatcher(self, dispatcher: str) -> str:
        """What a dispatcher says of itself, MessagePack; expires."""
        return f"{self.installation}dispatcher:{dispatcher}"

    def failed(self, key: str, unkeyed: str = "") -> str:
        """ErrorBody JSON of a failure that would happen again with the same `unkeyed`."""
        return f"{self.prefix}failed:{key}" + (f":{unkeyed}" if unkeyed else "")

    def kills(self, key: str, unkeyed: str = "") -> str:
        """How many compiles in a row with the same `unkeyed` were killed or timed out; expires."""
        return f"{self.prefix}kills:{key}" + (f":{unkeyed}" if unkeyed else "")

    def events(self, key: str) -> str:
        """Stream: stage, seconds, detail, error, asker."""
        return f"{self.prefix}events:{key}"

    def request(self, key: str) -> str:
        """The body of a compile in progress, for a gateway that takes it over."""
        return f"{self.prefix}request:{key}"

    def run(self, key: str) -> str:
        """Hash: started (ms), joins, finish (a person asked), leases (how often taken), killed (how many workers
        died of it), needs (CompileNeeds, MessagePack), trace (traceparent of whoever asked first)."""
        return f"{self.prefix}run:{key}"

    def waiters(self, key: str) -> str:
        """Sorted set: waiters by when they expire, ms."""
        return f"{self.prefix}waiters:{key}"
