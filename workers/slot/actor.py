"""Stage 6: a slot's Ray actor, an asyncio object with a fork server for compiles and one for searches.

It imports nothing of Ray, so that tests can use it directly. Both servers see only the actor's device. A searcher runs
for hours and must not block compiles, so it has a fork server of its own. On a GPU's first slot that server starts with
the slot: compiles wait for searches, and torch takes seconds to import. On other slots it starts with the first
searcher and stops after some idle time: torch without work takes some hundred MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from ...compiler.api.protocols import WORKERS
from ...compiler.errors import ProtocolMismatch
from ..messages import JobFailed, WorkerJob
from ..settings import SlotSettings
from .fork_server_client import ForkServerClient


class CompileSlot:
    """Runs one compile and one searcher at a time, each in a fresh child of a warm fork server."""

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self.compiles = ForkServerClient(settings)
        # with a name of its own: by that the client finds the processes to kill
        self.searches = ForkServerClient(
            msgspec.structs.replace(settings, worker=f"{settings.worker}-search", early_server=None)
        )
        self._idle_timer: asyncio.TimerHandle | None = None
        self._always_warm = settings.kind == "cuda" and settings.warm_searches
        self._warming: asyncio.Task[bytes] | None = None

    async def start(self) -> bytes:
        """Start the fork server for compiles if there is none; its ForkServerReady, or a JobFailed, encoded."""
        settings = self._settings
        try:
            WORKERS.check(settings.protocol, own=f"worker {settings.worker}", other="the dispatcher")
        except ProtocolMismatch as error:
            return msgspec.msgpack.encode(JobFailed.of(error))
        answer = await self.compiles.start()
        if self._always_warm:
            self._warming = asyncio.create_task(self.searches.start())  # the first searcher reports an error
        return answer

    async def lost(self) -> None:
        """Return once there is no fork server for compiles; `start` starts a new one."""
        await self.compiles.lost()

    async def compile(self, job_id: str, job: WorkerJob) -> AsyncIterator[bytes]:
        """Encoded StageEvents and JobQueries, then one encoded JobDone or JobFailed."""
        async for answer in self.compiles.run(job_id, job):
            yield answer

    async def search(self, job_id: str, job: WorkerJob) -> AsyncIterator[bytes]:
        """Like `compile`: JobQueries, then JobDone once the service has no more tasks for the searcher."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        try:
            async for answer in self.searches.run(job_id, job):
                yield answer
        finally:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._settings.search_idle_seconds, self.stop_idle_searches)

    def stop_idle_searches(self) -> None:
        if not (self.searches.busy() or self._always_warm):
            self.searches.close()

    async def cancel(self, job_id: str) -> None:
        """Kill job `job_id` if it still runs; its `compile` or `search` then ends with a JobFailed."""
        for client in (self.compiles, self.searches):
            await client.cancel(job_id)

    async def reply(self, job_id: str, question: int, answer: bytes) -> None:
        """Answer a query of job `job_id`, if it still runs."""
        for client in (self.compiles, self.searches):
            await client.reply(job_id, question, answer)

    async def close(self) -> None:
        """Stop both fork servers and their jobs."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        self.searches.close()
        self.compiles.close()
