"""A slot's Ray actor: an asyncio object with a fork server for compiles and one for searches.

Knows nothing of Ray, so that a test can hold one in its hands. Both servers see the actor's device and nothing else.
A searcher is a job of hours that must not keep compiles waiting, so it has a fork server of its own. Beside a GPU it is
there from the beginning: a compile waits for what is searched, and torch takes seconds to import. Elsewhere it is
started when the first searcher comes and stopped when none has for a while: torch without work holds some hundred MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from ..messages import WorkerJob
from ..settings import SlotSettings
from .fork_server_client import ForkServerClient


class CompileSlot:
    """One compile at a time and beside it one searcher, each in a fresh child of a warm fork server."""

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self._compiles = ForkServerClient(settings)
        # under a name of its own: by it the client knows what it must kill
        self._searches = ForkServerClient(
            msgspec.structs.replace(settings, worker=f"{settings.worker}-search")
        )
        self._resting: asyncio.TimerHandle | None = None
        self._keeps_warm = settings.kind == "cuda"
        self._warming: asyncio.Task[bytes] | None = None

    async def start(self) -> bytes:
        """Have a warm fork server for compiles; its ForkServerReady, or a JobFailed, encoded."""
        answer = await self._compiles.start()
        if self._keeps_warm:
            self._warming = asyncio.create_task(
                self._searches.start()
            )  # what goes wrong the first searcher says
        return answer

    async def lost(self) -> None:
        """Return once there is no fork server for compiles (any more); `start` brings a new one."""
        await self._compiles.lost()

    async def compile(
        self, job_id: str, request: bytes, key: str, seconds: float, namespace: str = "default"
    ) -> AsyncIterator[bytes]:
        """Encoded StageEvents and JobQueries, then one encoded JobDone or JobFailed."""
        async for answer in self._compiles.run(job_id, WorkerJob(key, request, seconds, namespace)):
            yield answer

    async def search(
        self, job_id: str, order: bytes, seconds: float, namespace: str = "default"
    ) -> AsyncIterator[bytes]:
        """As `compile`: JobQueries, then JobDone once the searcher is told that its work is over."""
        if self._resting is not None:
            self._resting.cancel()
        try:
            async for answer in self._searches.run(
                job_id, WorkerJob("search", order, seconds, namespace, work="search")
            ):
                yield answer
        finally:
            loop = asyncio.get_running_loop()
            self._resting = loop.call_later(self._settings.search_idle_seconds, self._rest)

    def _rest(self) -> None:
        if not (self._searches.busy() or self._keeps_warm):
            self._searches.close()

    async def cancel(self, job_id: str) -> None:
        """Kill job `job_id` if it still runs; its `compile` or `search` then ends with a JobFailed."""
        for client in (self._compiles, self._searches):
            await client.cancel(job_id)

    async def reply(self, job_id: str, question: int, answer: bytes) -> None:
        """Answer what job `job_id` asked, if it still runs."""
        for client in (self._compiles, self._searches):
            await client.reply(job_id, question, answer)

    async def close(self) -> None:
        """Stop both fork servers and their jobs."""
        if self._resting is not None:
            self._resting.cancel()
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        self._searches.close()
        self._compiles.close()
