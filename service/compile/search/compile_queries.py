"""What a running compile asks of its team's tuning database: a question's bytes in; Known's bytes out, or none.

The process that asks runs a tenant's graph, and may have been taken over by it. Its bytes are decoded within limits
against closed structs. What it reports is kept only of the device and versions that it was given to compile for. A
compile of user-written source can claim anything, and its claim would choose others' kernels (docs/decisions/0015): it
is believed of calls of its only source, and of nothing else (0021). It may ask: the entries are its own team's. It may
want problems searched: the service's own code does that elsewhere (service/compile/search/queue.py).
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
from .database import TuningDatabase
from .query_checks import decode_query, is_measurable
from .queue import SearchQueue

log = structlog.get_logger(__name__)


_SECONDS = 8.0
"""For one answer: the compile waits for ten (workers/fork_server/queries.py)."""


OnQuery = Callable[[queries.TuningQuery, Sequence[TuningEntry]], None]
"""Hears, in the event loop, what a compile asked and which entries it was answered."""


class CompileQueries:
    """The questions of one compile. `ask`: what it was given to compile. hear: who else wants to know of them."""

    def __init__(
        self, tunings: TuningDatabase, farm: SearchQueue, ask: CompileRequest, hear: OnQuery | None = None
    ) -> None:
        self._tunings = tunings
        self._farm = farm
        self._ask = ask
        self._hear = hear
        self._complained = False

    async def answer(self, question: bytes) -> bytes:
        """Raises nothing: b'' where there is no answer, and the first time a line in the log."""
        try:
            async with asyncio.timeout(_SECONDS):
                asked = decode_query(question)
                known = await self._known(asked)
        except (RelayError, RedisError, TimeoutError) as error:
            if not self._complained:
                self._complained = True
                log.warning(
                    "tuning_unanswered", key=self._ask.key, error=f"{type(error).__name__}: {error}"[:500]
                )
            return b""
        if self._hear is not None:
            self._hear(asked, known.entries)
        return msgspec.msgpack.encode(known)

    async def _known(self, question: queries.TuningQuery) -> KnownEntries:
        match question:
            case EntryLookup(place, problems):
                return KnownEntries(await self._tunings.known(place, problems))
            case SearchRequest(place, problems, patience):
                return await self._farm.want(place, problems, self._ask, patience=patience)
            case SearchResult(entry) if self._believes(entry):
                return KnownEntries([kept.entry for kept in await self._tunings.keep([entry])])
            case SearchResult(entry):
                return KnownEntries(await self._tunings.known(entry.place, [entry.problem]))
            case _:
                raise MalformedRequest(f"no compile asks {type(question).__name__}")

    def _believes(self, entry: TuningEntry) -> bool:
        if not is_measurable(entry.place, self._ask.toolchain, self._ask.target):
            return False
        if kernels.is_of_source(entry.problem):
            return [kernels.source_of(entry.problem)] == self._ask.sources
        return not self._ask.sources
