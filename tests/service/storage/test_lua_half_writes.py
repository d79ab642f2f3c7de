"""A Lua script that fails has written nothing: Redis does not roll back. Holds for every script, or a test fails.

`CALLS` has valid calls of each script, which together reach all its Redis commands. Each is repeated with one argument
malformed, with arguments missing at the end, and on stored values that are malformed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import NamedTuple

import pytest
import redis
from redis.client import Pipeline
from redis.exceptions import ResponseError
from service_parts import RedisServer
from torchrelay.service.storage.redis.keys import Keys

Argument = str | bytes | int | float

KEYS = Keys("torchrelay:")
TEAM = KEYS.of("team")
KEY, OTHER, DIGEST = "ab" * 32, "ba" * 32, "cd" * 32
FUTURE, HOUR = 4_000_000_000_000, 3_600_000
EVENT: list[Argument] = ["action", "x"]

MALFORMED: list[Argument] = [
    *("many", "", "nan", "-nan", "inf", "-inf", "1e400", "9" * 300, "-" + "9" * 300, "9223372036854775807"),
    *("-1", "0", "1.5", "1e18", "0x", "{", "[]", "null", '{"state":', b"\xff\xc1", "torchrelay:other"),
]


class Call(NamedTuple):
    """A valid call. stored: commands that write what it finds."""

    script: str
    keys: Sequence[str]
    args: Sequence[Argument]
    stored: Sequence[tuple[Argument, ...]] = ()


def entry(
    keys: Keys = KEYS, key: str = KEY, place: str = "redis", used: int = 1000
) -> list[tuple[Argument, ...]]:
    """An entry of the index."""
    index: list[Argument] = [
        "digest",
        DIGEST,
        "size",
        100,
        "place",
        place,
        "namespace",
        keys.namespace,
        "seconds",
        "1.5",
    ]
    return [
        ("HSET", keys.index(key), *index, "created", 1000),
        ("ZADD", keys.lru, used, key),
        ("HSET", keys.sizes, key, 100),
        ("INCRBY", keys.inline, 100),
        ("INCRBY", keys.bytes, 100),
        ("ZINCRBY", keys.namespace_bytes, 100, keys.lru),
        ("SET", keys.blob(DIGEST), "data"),
        ("HSET", keys.stats, "damaged", 1, "evictions", 1),
    ]


QUEUED: list[tuple[Argument, ...]] = [
    ("HSET", KEYS.run(KEY), "started", 1000, "joins", 2, "trace", "t", "leases", 1),
    ("SET", KEYS.request(KEY), "body"),
    ("XADD", KEYS.events(KEY), "1-0", "stage", "queued", "seconds", 0),
    ("ZADD", KEYS.active, FUTURE, KEY),
    ("ZADD", KEYS.pending, FUTURE, KEYS.lease(KEY)),
    ("ZADD", KEYS.waiters(KEY), FUTURE, "waiter"),
    ("SET", KEYS.fence, 1),
]
OF_JOB: tuple[Argument, ...] = ("HSET", KEYS.pending_priorities, KEYS.lease(KEY), 2)
LEASED: list[tuple[Argument, ...]] = [*QUEUED, ("SET", KEYS.lease(KEY), "me:1")]
QUOTA: list[tuple[Argument, ...]] = [
    ("HSET", KEYS.namespaces, "default", '{"compiles":9,"compile_seconds":100,"bytes":100}', "team", "{}"),
    ("SET", KEYS.spent, 1000),
]


def acquire(
    mode: str,
    *stored: tuple[Argument, ...],
    owner: str = "me",
    body: str = "body",
    limits: Sequence[Argument] = (10, "default", "default", 0, 0.0),
    priority: int = 0,
) -> Call:
    """limits: most queued, namespace, default, most compiles, most seconds."""
    args = [*renewal(owner, body), mode, "compiles", *limits, "trace", 1 << 30, priority]
    return Call("acquire", KEYS.compile_keys(KEY), args, stored)


def renewal(owner: str, body: str) -> list[Argument]:
    return [KEY, owner, 1000, HOUR, KEYS.wake, 60_000, body, "needs"]


def renew(*stored: tuple[Argument, ...], owner: str = "me", body: str = "") -> Call:
    return Call("renew", KEYS.compile_keys(KEY), renewal(owner, body), stored)


def leased(script: str, *args: Argument, stored: Sequence[tuple[Argument, ...]] = ()) -> Call:
    kills = ("SET", KEYS.kills(KEY), 1)
    return Call(script, KEYS.compile_keys(KEY), [KEY, "me:1", *args], [*LEASED, kills, *stored])


SNAPSHOT_KEYS = [KEYS.events(KEY), KEYS.lease(KEY), KEYS.index(KEY), KEYS.pending, KEYS.pending_priorities]

COMPILES = [
    acquire("queue", *QUOTA),
    acquire("queue", *QUOTA, body=""),
    acquire("queue", ("HSET", KEYS.run(KEY), "sending", FUTURE), body=""),
    acquire("queue", *QUEUED),
    acquire("queue", *QUEUED[1:4], priority=1),
    acquire("queue", *LEASED),
    acquire("queue", *LEASED, owner="other"),
    acquire("queue", *LEASED, owner="other", priority=1),
    acquire("queue", *entry()),
    acquire("queue", ("SET", KEYS.failed(KEY), "{}")),
    acquire("queue", *QUOTA, limits=(0, "default", "default", 0, 0.0)),
    acquire("queue", ("ZADD", KEYS.active, FUTURE, OTHER), limits=(10, "team", "default", 1, 1.5)),
    acquire("queue", ("SET", KEYS.spent, 9000), limits=(10, "team", "default", 1, 1.5)),
    acquire("queue", ("HSET", KEYS.pending_bytes, KEYS.lease(KEY), 9), OF_JOB, *QUOTA),
    acquire("queue", *QUOTA, priority=2),
    acquire("queue", *QUEUED, OF_JOB),
    acquire("queue", *QUEUED, OF_JOB, priority=1),
    acquire("queue", *LEASED, OF_JOB, owner="other"),
    acquire("take", *QUEUED),
    acquire("take", *QUEUED, OF_JOB),
    acquire("take", *QUEUED, OF_JOB, limits=(10, "default", "default", 1, 0.0)),
    acquire("take", *LEASED),
    acquire("take", *QUEUED[4:5]),
    renew(*LEASED),
    renew(*LEASED, owner="other"),
    renew(*entry()),
    renew(*QUEUED[6:], body="body"),
    renew(*QUEUED),
    renew(),
    leased("progress", HOUR, KEYS.wake, "lower", "detail"),
    leased("fail", HOUR, KEYS.wake, "{}", "detail", 1000, HOUR),
    leased("fail", HOUR, KEYS.wake, "{}", "detail", 1000, 0),
    leased("release", KEYS.wake, HOUR, "compiles", 0),
    leased("release", KEYS.wake, HOUR, "compiles", 1, stored=[OF_JOB]),
    Call("snapshot", SNAPSHOT_KEYS, ["0-0"], LEASED),
]


def publish(place: str, token: str, *stored: tuple[Argument, ...]) -> Call:
    return Call(
        "publish",
        [*KEYS.entry_keys(KEY), *KEYS.compile_keys(KEY)],
        [
            *(KEY, 100, KEYS.blob(DIGEST), token, DIGEST, 100, place, "default", "1.500000"),
            *(HOUR, KEYS.wake, 1, 2, 0, *EVENT),
        ],
        [*stored, ("SET", KEYS.kills(KEY), 1), ("HSET", KEYS.stats, "compiles", 1, "seconds_saved", "1.5")],
    )


def of_entry(script: str, *args: Argument, stored: Sequence[tuple[Argument, ...]] = ()) -> Call:
    return Call(script, KEYS.entry_keys(KEY), [KEY, 100, *args], [*entry(), *stored])


def evict(whose: str, limit: int, *stored: tuple[Argument, ...]) -> Call:
    keys = [KEYS.namespaces, *KEYS.sum_keys]
    return Call("evict", keys, [KEYS.installation, "default", whose, limit, 10, "default"], [*QUOTA, *stored])


def count_entries(*stored: tuple[Argument, ...]) -> Call:
    keys = [KEYS.lru, KEYS.pinned, KEYS.sizes]
    return Call("count_entries", keys, [KEYS.index_prefix, KEY, OTHER], stored)


TWO_ENTRIES = [*entry(), *entry(key=OTHER, used=2000)]

CACHE = [
    publish("redis", "me:1", *LEASED, *entry()[1:]),
    publish("redis", "import", *entry()),
    publish("store", "import", ("HSET", KEYS.sizes, KEY, 100)),
    Call("lookup", [KEYS.index(KEY)], [KEYS.blob_prefix, "have"], entry()),
    of_entry("quarantine", KEYS.blob_prefix, DIGEST, HOUR, *EVENT),
    of_entry("remove", KEYS.blob_prefix, *EVENT),
    of_entry("pin", "pinned", *EVENT),
    of_entry("pin", "unpinned", *EVENT, stored=[("ZADD", KEYS.pinned, 1000, KEY)]),
    Call(
        "record_uses",
        [KEYS.lru, KEYS.pinned, KEYS.stats, KEYS.fallbacks],
        [*(3, "requests", -1, "seconds_saved", 1.25, "fallback:timeout", 2), *(KEY, 10, OTHER, 20)],
        [*entry(), ("HSET", KEYS.stats, "requests", 1, "seconds_saved", "1.5", "bytes_served", 1)],
    ),
    count_entries(*entry(), ("HSET", KEYS.sizes, KEY, 99), ("ZREM", KEYS.lru, KEY)),
    count_entries(*TWO_ENTRIES, ("HSET", KEYS.index(OTHER), "created", 7), ("ZREM", KEYS.lru, OTHER)),
    Call(
        "mend_sums",
        KEYS.sum_keys,
        [KEYS.bytes, 200, 7, KEYS.inline, 199, 7, KEYS.lru, 100.0, 7, TEAM.lru, 100, 100],
        [*entry(), *entry(TEAM)],
    ),
    evict("", 150, *TWO_ENTRIES, *entry(TEAM)),
    evict("", 150, *TWO_ENTRIES, *entry(TEAM), ("DEL", KEYS.lru)),
    evict("default", 0, *TWO_ENTRIES),
    evict("default", 0, *entry(key=OTHER, used=2000), *entry(), ("HDEL", KEYS.sizes, KEY)),
    Call(
        "describe",
        [KEYS.components(KEY), KEYS.described, KEYS.described_bytes],
        ["components", 12],
        [
            ("RPUSH", KEYS.described, f"10:{KEYS.components(OTHER)}"),
            ("SET", KEYS.described_bytes, 10),
            ("SET", KEYS.components(OTHER), "components"),
        ],
    ),
    Call(
        "record_miss",
        [KEYS.miss(KEY), KEYS.misses, KEYS.graphs, KEYS.same_graph("g")],
        [KEY, "g", "components", HOUR, 1, 1, 1, KEYS.miss_prefix, KEYS.same_graph_prefix],
        [
            ("ZADD", KEYS.misses, 1000, OTHER),
            ("ZADD", KEYS.graphs, 1000, "old"),
            ("ZADD", KEYS.same_graph("g"), 1000, OTHER),
        ],
    ),
    Call(
        "record_run",
        [KEYS.runs, KEYS.run_sizes, KEYS.run_bytes, KEYS.launch("l"), KEYS.stats],
        [
            "new",
            0,
            "record",
            "summary",
            KEYS.run_records(""),
            KEYS.run_summaries(""),
            1,
            HOUR,
            HOUR,
            1,
            1000,
            1000,
            "ready:3",
        ],
        [
            ("ZADD", KEYS.runs, 1000, "old"),
            ("HSET", KEYS.run_sizes, "old", 6),
            ("HSET", KEYS.run_summaries("old"), "0", "summary"),
            ("SET", KEYS.run_bytes, 6),
            ("SET", KEYS.launch("l"), "old"),
        ],
    ),
    Call(
        "record_script_use",
        [KEYS.script("s"), KEYS.scripts, KEYS.script_sizes("s")],
        ["s", HOUR, 1, 1, 1, KEYS.script_prefix, KEYS.script_sizes_prefix, 1, 1, DIGEST, OTHER, KEY, OTHER],
        [
            ("ZADD", KEYS.scripts, 1000, "old"),
            ("ZADD", KEYS.script("old"), 1000, KEY),
            ("ZADD", KEYS.script_sizes("old"), 1000, KEY),
            ("ZADD", KEYS.script_sizes("s"), 1000, OTHER),
        ],
    ),
]

TUNING, TRAINING = KEYS.jobs["tune"], KEYS.jobs["train"]


def of_job(
    script: str, keys: Sequence[str], args: Sequence[Argument], *fields: Argument, training: bool
) -> Call:
    """fields: of the job `j`, which `me` has leased. Another one has ended."""
    jobs = TRAINING if training else TUNING
    usual: list[Argument] = ["cancelled_by", "", "events", 1, "resumes", 1, "bytes", 9]
    return Call(
        script,
        keys,
        args,
        [
            ("HSET", jobs.job("j"), *usual, *fields),
            ("HSET", jobs.job("old"), "state", "done"),
            ("ZADD", jobs.all, 1000, "old", 2000, "j"),
            ("ZADD", jobs.open, 2000, "j"),
            ("ZADD", KEYS.open_jobs, 2000, jobs.job("j")),
            ("SET", jobs.part("j", "lease"), "me:1"),
            ("XADD", jobs.part("j", "events"), "1-0", "event", "state", "data", "{}"),
            ("XADD", jobs.part("j", "history"), "1-0", "data", "{}"),
            ("HSET", jobs.part("j", "bodies"), 0, "body"),
            ("HSET", jobs.part("j", "files"), "a.py", '{"bytes":10}'),
        ],
    )


def create(kind: str, *event: Argument, most: int = 2, most_open: int = 10) -> Call:
    jobs = TRAINING if kind == "train" else TUNING
    keys = [jobs.all, jobs.open, jobs.job("new"), KEYS.audit, KEYS.open_jobs]
    fields: list[Argument] = ["", "state", "waiting", ":items", 0, "{}"]
    args: list[Argument] = ["new", kind, KEYS.wake, 3000, most, most_open, 1000, 100, 0, *event, *fields]
    return of_job("create_job", keys, args, "state", "running", training=kind == "train")


def change(kind: str, transition: str, state: str, owner: str = "", most_open: int = 10) -> Call:
    jobs = TRAINING if kind == "train" else TUNING
    keys = [jobs.all, jobs.open, jobs.job("j"), KEYS.open_jobs]
    event, fields = ["state", "{}", "history", "{}"], ["detail", "x", "cancelled_by", ""]
    what: list[Argument] = [transition, owner, "waiting", most_open, 10]
    args: list[Argument] = ["j", kind, KEYS.wake, *what, *event, *fields]
    return of_job("change_job", keys, args, "state", state, training=kind == "train")


def hold_job(kind: str, ms: int, owner: str, *fields: Argument) -> Call:
    jobs = TRAINING if kind == "train" else TUNING
    keys = [jobs.job("j"), jobs.part("j", "lease"), KEYS.fence, KEYS.open_jobs]
    args: list[Argument] = ["j", kind, KEYS.wake, owner, ms, ""]
    return of_job("hold_job", keys, args, *fields, training=kind == "train")


def record(kind: str, most_bytes: int, fields: Sequence[Argument], *events: Argument) -> Call:
    jobs = TRAINING if kind == "train" else TUNING
    count = len(fields) // 3
    args: list[Argument] = ["j", kind, "me:1", 1, KEYS.wake, 1000, most_bytes, count, *fields, *events]
    keys = [jobs.job("j"), jobs.part("j", "lease")]
    return of_job("record_job", keys, args, "state", "running", training=kind == "train")


JOBS = [
    create("train", "state", "{}", "history", "{}"),
    create("tune", "job", "{}", "", ""),
    create("train", "", "", "", "", most=10),
    create("train", "", "", "", "", most_open=1),
    *(change(kind, "end", "running", "me:1") for kind in ("train", "tune")),
    change("train", "cancel", "running"),
    *(change(kind, "resume", "failed") for kind in ("train", "tune")),
    change("train", "resume", "failed", most_open=1),
    hold_job("tune", 1000, "me", "state", "waiting"),
    hold_job("tune", 1000, "other", "state", "waiting"),
    hold_job("train", 1000, "me", "state", "done"),
    hold_job("train", 1000, "me"),
    hold_job("train", 1000, "me", "state", "running"),
    hold_job("train", 0, "me", "state", "running"),
    record("tune", 1000, [":progress", 1, "{}", ":results", 1, "r", ":bodies", 0, ""], "item", "{}", "", ""),
    record("tune", 1000, ["", "progress", "{}", "", "detail", ""]),
    record(
        "train",
        3,
        ["", "progress", "{}", "", "state", "running"],
        *("metrics", "{}", "metrics", "{}", "log", "{}", "logs", "{}", "state", "{}", "history", "{}"),
    ),
    of_job(
        "archive_training_events",
        [TRAINING.part("j", part) for part in ("history", "segments", "lease")],
        ["history", 1, 1, "me:1"],
        *("state", "running"),
        training=True,
    ),
    of_job(
        "add_training_file",
        [TRAINING.job("j"), TRAINING.part("j", "files")],
        ["b.py", '{"bytes":10}', 10, 10, 1000],
        *("state", "running"),
        training=True,
    ),
]

TUNINGS, AUTOTUNES = [KEYS.tunings, KEYS.tuned], [KEYS.autotunes, KEYS.autotuned]
STORED_TUNINGS: list[tuple[Argument, ...]] = [
    ("HSET", KEYS.tunings, "a", "1", "b", "2"),
    ("ZADD", KEYS.tuned, 1, "a", 2, "b"),
]
SLOTS = KEYS.slot_keys("g")
MADE = '{"id":"x","namespace":"team","rate":2}'
RECORD = '{"id":"x","namespace":"team"}'


def claim(lease_ms: int, *slots: Argument, stored: Sequence[tuple[Argument, ...]] = ()) -> Call:
    return Call("claim_slots", SLOTS, ["me", lease_ms, *slots], stored)


def authenticate(record: str, stored: int) -> Call:
    """stored: when the bucket is full again."""
    return Call(
        "authenticate",
        [KEYS.tokens, KEYS.bucket("d"), KEYS.namespaces, KEYS.deleted],
        ["d", 500.0, 10, KEYS.installation, "default", record],
        [("HSET", KEYS.tokens, "d", RECORD), ("SET", KEYS.bucket("d"), stored)],
    )


OTHERS = [
    authenticate("", 0)._replace(stored=[]),
    Call("find_tunings", TUNINGS, ["a", "none", "b"], STORED_TUNINGS),
    Call("store_tunings", TUNINGS, [2, "replace", "a", "3", "c", "4"], STORED_TUNINGS),
    Call("store_tunings", AUTOTUNES, [2, "", "a", "3"]),
    claim(30_000, 2, "s1", "s2", "s1", stored=[("ZADD", SLOTS[1], FUTURE, "other", 1000, "dead")]),
    claim(30_000, 2, "s1", "s2"),
    claim(
        *(30_000, 2, "s1", "s2", "s1", "s3"),
        stored=[("ZADD", SLOTS[1], FUTURE, "me"), ("HSET", SLOTS[0], "s1", "me-", "s3", "me", "s4", "dead")],
    ),
    claim(0, 0, stored=[("ZADD", SLOTS[1], FUTURE, "me"), ("HSET", SLOTS[0], "s1", "me")]),
    Call(
        "join",
        [KEYS.identity],
        [5, 4, KEYS.wake, "protocol"],
        [("HSET", KEYS.identity, "protocol", 4, "oldest", 3)],
    ),
    Call("charge", [KEYS.spent, KEYS.stats], ["1.500000", HOUR]),
    Call(
        "charge",
        [KEYS.spent, KEYS.stats],
        ["1.500000", HOUR],
        [("SET", KEYS.spent, 1), ("HSET", KEYS.stats, "seconds_spent", "1.5")],
    ),
    authenticate(MADE, 0),
    authenticate("", 0),
    authenticate(MADE, FUTURE * 1000),
    Call("namespace_exists", [KEYS.namespaces], ["team"]),
    Call(
        "save_request",
        [KEYS.saved, KEYS.saved_sizes, KEYS.saved_total, KEYS.saved_request(KEY), KEYS.request(KEY)],
        ["", 6],
        [
            ("SET", KEYS.request(KEY), "body"),
            ("ZADD", KEYS.saved, 1000, KEYS.saved_request(OTHER)),
            ("HSET", KEYS.saved_sizes, KEYS.saved_request(OTHER), 4),
            ("SET", KEYS.saved_total, 4),
        ],
    ),
]

CALLS = [*COMPILES, *CACHE, *JOBS, *OTHERS]
NAMED = [pytest.param(call, id=f"{call.script}-{at}") for at, call in enumerate(CALLS)]
STEPWISE = {"evict"}
"""Each entry that it takes is a step of its own, with stored values of another namespace."""
each_call = pytest.mark.parametrize("call", NAMED)


def sources() -> dict[str, str]:
    """The prelude is `prelude`."""
    folder = resources.files("torchrelay.service.storage.redis") / "lua"
    return {
        file.name.removesuffix(".lua"): file.read_text("utf-8")
        for group in folder.iterdir()
        for file in group.iterdir()
    }


SOURCES = sources()
WRITES = "rdb_changes_since_last_save"


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client


def store(client: redis.Redis | Pipeline, call: Call) -> None:
    client.flushall()
    for command in call.stored:
        client.execute_command(*command)


def run(client: redis.Redis, call: Call) -> object:
    return client.eval(SOURCES["prelude"] + SOURCES[call.script], len(call.keys), *call.keys, *call.args)


class Attempt(NamedTuple):
    """A call that may fail. changed: a command that changes what is stored for it."""

    what: object
    call: Call
    changed: tuple[Argument | bytes, ...] = ()


def half_written(client: redis.Redis, attempts: Sequence[Attempt]) -> dict[object, str]:
    """Those that failed and had written before that, and the error. Redis counts each write, also those of expiries."""
    pipe = client.pipeline(transaction=False)
    at = []
    for _, call, changed in attempts:
        store(pipe, call)
        if changed:
            pipe.execute_command(*changed)
        sha = client.script_load(SOURCES["prelude"] + SOURCES[call.script])
        pipe.info("persistence").evalsha(sha, len(call.keys), *call.keys, *call.args).info("persistence")
        at.append(len(pipe))
    answers = pipe.execute(raise_on_error=False)
    found = {}
    for attempt, end in zip(attempts, at, strict=True):
        before, answer, after = answers[end - 3 : end]
        if isinstance(answer, ResponseError) and before[WRITES] != after[WRITES]:
            found[attempt.what] = str(answer)
    return found


def test_each_script_has_a_call() -> None:
    assert {call.script for call in CALLS} == {*SOURCES} - {"prelude"}


@each_call
def test_a_valid_call_succeeds(client: redis.Redis, call: Call) -> None:
    store(client, call)
    run(client, call)


@pytest.mark.parametrize("script", sorted(SOURCES))
def test_the_calls_reach_each_command_of_a_script(client: redis.Redis, script: str) -> None:
    """So that no step is left out of what follows."""
    numbers = iter(range(1000))
    code = re.sub(r"--.*", "", SOURCES[script])
    marked = re.sub(r"redis\.p?call\(", lambda _: f"reached({next(numbers)}, ", code)
    head = "local function reached(n, ...) redis.call('SADD', 'reached', n) return redis.call(...) end\n"
    missed = set(range(next(numbers)))
    for call in CALLS:
        if script in ("prelude", call.script):
            text = {**SOURCES, script: marked}
            store(client, call)
            client.eval(head + text["prelude"] + text[call.script], len(call.keys), *call.keys, *call.args)
            missed -= {int(number) for number in client.smembers("reached")}
    lines = [line.strip() for line in marked.splitlines() for n in missed if f"reached({n}, " in line]
    assert not lines


@each_call
def test_a_malformed_argument_leaves_nothing_half_written(client: redis.Redis, call: Call) -> None:
    attempts = [
        Attempt(
            (position, value), call._replace(args=[*call.args[:position], value, *call.args[position + 1 :]])
        )
        for position in range(len(call.args))
        for value in MALFORMED
    ]
    assert not half_written(client, attempts)


@each_call
def test_missing_arguments_leave_nothing_half_written(client: redis.Redis, call: Call) -> None:
    attempts = [Attempt(count, call._replace(args=call.args[:count])) for count in range(len(call.args))]
    assert not half_written(client, attempts)


@pytest.mark.parametrize("call", [each for each in NAMED if each.values[0].script not in STEPWISE])
def test_a_malformed_value_in_redis_leaves_nothing_half_written(client: redis.Redis, call: Call) -> None:
    store(client, call)
    attempts = [
        Attempt((*place, value), call, (*place, value))
        for name in client.scan_iter()
        for place in places(client, name)
        for value in MALFORMED
    ]
    assert not half_written(client, attempts)


def places(client: redis.Redis, name: bytes) -> list[tuple[Argument, ...]]:
    """Commands that write a value of a string or a hash, but for the value."""
    match client.type(name):
        case b"string":
            return [("SET", name)]
        case b"hash":
            return [("HSET", name, field) for field in client.hkeys(name)]
    return []
