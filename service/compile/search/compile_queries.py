"""Answers the queries of a running compile to its namespace's tuning database.

A tenant's graph may control the process that asks. So its bytes are decoded within limits into closed structs, and its
results are stored only for the device and versions that it compiles for. A compile of user-written source can report
any result, which would choose others' kernels (docs/decisions/0015): only results for its single source are accepted
(0021). It may look up entries of its own namespace and ask for searches, which trusted code runs (queue.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog
from redis.exceptions import RedisError

from ....compiler.api.tuning import kernels
from ....compiler.errors import MalformedRequest, RelayError
from ....compiler.tuning import queries
from ....compiler.tuning.queries import EntryLookup, KnownEntries, SearchRequest, SearchResult
from ....compiler.tuning.records import TuningEntry
from ...admission.compile_request import CompileRequest
from ..single_flight import Priority
from .database import TuningDatabase
from .queue import SearchQueue, decode_query
from .task import SearchTarget

log = structlog.get_logger(__name__)


_SECONDS = 8.0
"""The limit of one answer: the compile waits ten (workers/fork_server/queries.py)."""


OnQuery = Callable[[queries.TuningQuery, Sequence[TuningEntry]], None]
"""Called in the event loop with what a compile asked and the entries of the answer."""


class CompileQueries:
    """The queries of one compile. `request`: what it compiles. `on_query`: called with each query and its answer.
    `priority`: of who waits for it."""

    def __init__(
        self,
        tunings: TuningDatabase,
        queue: SearchQueue,
        request: CompileRequest,
        on_query: OnQuery | None = None,
        priority: Priority = Priority.PERSON,
    ) -> None:
        self._tunings = tunings
        self._queue = queue
        self._request = request
        self._on_query = on_query
        self._priority = priority
        self._warned = False

    async def answer(self, data: bytes) -> bytes:
        """Raises nothing. b'': there is no answer; the first time the reason is logged."""
        try:
            async with asyncio.timeout(_SECONDS):
                query = decode_query(data)
                known = await self._known(query)
        except (RelayError, RedisError, TimeoutError) as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "tuning_unanswered", key=self._request.key, error=f"{type(error).__name__}: {error}"[:500]
                )
            return b""
        if self._on_query is not None:
            self._on_query(query, known.entries)
        return msgspec.msgpack.encode(known)

    async def _known(self, query: queries.TuningQuery) -> KnownEntries:
        match query:
            case EntryLookup(environment, problems):
                return KnownEntries(await self._tunings.known(environment, problems))
            case SearchRequest(environment, problems, seconds):
                return await self._queue.want(
                    environment, problems, self._request, priority=self._priority, wait_seconds=seconds
                )
            case SearchResult(entry) if self._accepts(entry):
                return KnownEntries([stored.entry for stored in await self._tunings.store([entry])])
            case SearchResult(entry):
                return KnownEntries(await self._tunings.known(entry.place, [entry.problem]))
            case _:
                raise MalformedRequest(f"no compile asks {type(query).__name__}")

    def _accepts(self, entry: TuningEntry) -> bool:
        if not SearchTarget(self._request.toolchain, self._request.target).is_measurable(entry.place):
            return False
        if kernels.is_of_source(entry.problem):
            return [kernels.source_of(entry.problem)] == self._request.sources
        return not self._request.sources
