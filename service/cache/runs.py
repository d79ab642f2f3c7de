"""Runs of scripts, as their processes told of them at exit: those of a month, at most RUNS and BYTES in a namespace.

A process without a launcher is a run of its own. Those that one launcher started are one run, if they tell of it within
an hour of each other.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import difflib
import hashlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from ...compiler import decoding
from ...compiler.api import runs
from ...compiler.errors import NotFound, RequestError
from ...compiler.request import codec
from ..access.tokens import Grant
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts
from .script_history import seconds_saved
from .usage import figures_of

RUNS = 10_000
BYTES = 64 << 20
"""Compressed, in Redis."""
RUN_BYTES = 8 << 20
RECORD_BYTES = 1 << 20
"""A process's record as JSON."""
LISTED = 100
READ_BYTES = 4 << 20
"""Compressed records that are read for one page."""
_TTL_SECONDS = 30 * 86400
_LAUNCH_SECONDS = 3600
_FIRST = "first"

T = TypeVar("T")


class Runs:
    """Every method raises RedisError."""

    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def record(self, record: runs.RunRecord, *, by: Grant) -> runs.RunReply:
        """Stores what a process of the holder of `by` tells of its run."""
        saved = await self._saved(record)
        process = runs.RunProcess(record, saved)
        summary = _summary(process, by.name)
        launched = bool(record.launch) and record.rank is not None
        launch = hashlib.sha256(f"{by.id}\0{record.launch}\0{record.program}".encode()).hexdigest()
        keys = self._keys
        found = await self._scripts.record_run(
            keys=[keys.runs, keys.run_sizes, keys.run_bytes, keys.launch(launch), keys.stats],
            args=[
                secrets.token_hex(8),
                record.rank or 0,
                codec.compress(msgspec.json.encode(process)),
                msgspec.json.encode(summary),
                keys.run_records(""),
                keys.run_summaries(""),
                int(launched),
                _LAUNCH_SECONDS * 1000,
                _TTL_SECONDS * 1000,
                RUNS,
                BYTES,
                RUN_BYTES,
                *figures_of(summary),
            ],
        )
        run = found.decode()
        return runs.RunReply(run, f"/runs/{run}", saved)

    async def latest(self, before: float = 0.0) -> runs.RunList:
        """LISTED runs. before: only those that ended before, seconds since 1970."""
        keys = self._keys
        limit = f"({round(before * 1000)}" if before else "+inf"
        found = await self._redis.zrange(
            keys.runs, limit, "-inf", desc=True, byscore=True, offset=0, num=LISTED + 1, withscores=True
        )
        async with self._redis.pipeline(transaction=False) as pipe:
            for run, _ in found[:LISTED]:
                pipe.hget(keys.run_summaries(run.decode()), _FIRST)
                pipe.hlen(keys.run_summaries(run.decode()))
            stored = await pipe.execute()
        listed = []
        for (run, _), summary, fields in zip(found, stored[::2], stored[1::2], strict=False):
            if (known := _decoded(summary, runs.RunSummary)) is not None:
                listed.append(replace(known, run=run.decode(), ranks=max(fields - 1, 1)))
        more = len(found) > LISTED
        return runs.RunList(listed, found[LISTED - 1][1] / 1000 if more else 0.0)

    async def get(self, run: str, rank: int = 0) -> runs.Run:
        """Raises NotFound."""
        fields = await self._redis.hgetall(self._keys.run_summaries(run))
        summary = _decoded(fields.pop(_FIRST.encode(), None), runs.RunSummary)
        if summary is None:
            raise NotFound(
                f"there is no run {run}", hint="Runs are kept for a month, as long as there is room for them"
            )
        ranks = [each for text in fields.values() if (each := _decoded(text, runs.RunSummary)) is not None]
        ranks.sort(key=lambda each: each.rank)
        known = [each.rank for each in ranks]
        shown = rank if rank in known else next(iter(known), 0)
        record = await self._redis.hget(self._keys.run_records(run), str(shown))
        process = None
        with contextlib.suppress(RequestError):  # damaged: the others can be shown
            data = None if record is None else codec.decompress(record, 2 * RECORD_BYTES)
            process = _decoded(data, runs.RunProcess)
        return runs.Run(replace(summary, run=run, ranks=max(len(fields), 1)), ranks, process)

    async def earlier(self, summary: runs.RunSummary) -> str:
        """The latest run of the same script before this one, of those that one list holds; '' if there is none."""
        listed = (await self.latest(summary.ended)).runs
        return next(
            (each.run for each in listed if each.program == summary.program and each.run != summary.run), ""
        )

    async def using(self, key: str) -> tuple[list[tuple[runs.RunSummary, runs.RunRecord]], int]:
        """Those of the latest runs whose first process had a graph with this key; and how many were looked at, at most
        LISTED, and as many as READ_BYTES hold."""
        latest = (await self.latest()).runs
        sizes = await self._redis.hmget(self._keys.run_sizes, [each.run for each in latest]) if latest else []
        total = list(itertools.accumulate(int(size or 0) for size in sizes))
        looked = latest[: bisect.bisect_right(total, READ_BYTES)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for each in looked:
                pipe.hget(self._keys.run_records(each.run), str(each.rank))
            records = await pipe.execute()
        found = await asyncio.to_thread(lambda: [_record_with(record, key) for record in records])
        return [(run, used) for run, used in zip(looked, found, strict=True) if used], len(looked)

    async def _saved(self, record: runs.RunRecord) -> float:
        """What the artifacts that it did not have compiled took to compile, for each once."""
        keys = {each.key for each in record.graphs if each.key and each.outcome in runs.HITS}
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(self._keys.index(key), "seconds")
            return sum(seconds_saved(text) for text in await pipe.execute() if text is not None)


def _record_with(record: bytes | None, key: str) -> runs.RunRecord | None:
    with contextlib.suppress(RequestError):
        process = _decoded(record and codec.decompress(record, 2 * RECORD_BYTES), runs.RunProcess)
        if process is not None and key in {
            *process.record.sources,
            *(it.key for it in process.record.graphs),
        }:
            return process.record
    return None


def compare(here: runs.Run, there: runs.Run) -> runs.Comparison:
    """The graphs of two runs side by side."""
    graphs = [list(each.process.record.graphs) if each.process else [] for each in (here, there)]
    here_names, there_names = (_names(each) for each in graphs)
    rows: list[runs.ComparedGraph] = []
    matches = difflib.SequenceMatcher(None, here_names, there_names, autojunk=False)
    for _, first, after, other_first, other_after in matches.get_opcodes():
        pairs = itertools.zip_longest(graphs[0][first:after], graphs[1][other_first:other_after])
        rows += [runs.ComparedGraph(one, other) for one, other in pairs]
    return runs.Comparison(there.summary, rows)


def _names(graphs: Iterable[runs.GraphRecord]) -> list[tuple[str, int]]:
    """A graph's key, and how often it came before: names that come twice would make a comparison slow."""
    before: Counter[str] = Counter()
    names = []
    for graph in graphs:
        names.append((graph.key, before[graph.key]))
        before[graph.key] += 1
    return names


def _summary(process: runs.RunProcess, name: str) -> runs.RunSummary:
    record = process.record
    missed = [each for each in record.graphs if each.outcome in ("miss", "coalesced") and each.key]
    slowest = max(missed, key=lambda each: each.seconds, default=None)
    return runs.RunSummary(
        run="",
        program=record.program,
        by=name,
        ended=time.time(),  # whatever the client's clock says
        graphs=len(record.graphs),
        hits=runs.hits(record),
        misses=record.misses + record.coalesced,
        fallbacks=runs.local_compiles(record),
        programs=record.programs,
        seconds=sum(seconds for stage, seconds in record.seconds.items() if stage != "trace"),
        saved_seconds=process.saved_seconds,
        alone=sum(record.alone.values()),
        torch=record.torch,
        rank=record.rank or 0,
        slowest=slowest.key if slowest else "",
        slowest_seconds=slowest.seconds if slowest else 0.0,
    )


def _decoded(data: bytes | None, type: type[T]) -> T | None:
    """None for what is missing or damaged."""
    try:
        return None if data is None else decoding.from_json(data, type=type)
    except msgspec.MsgspecError:
        return None
