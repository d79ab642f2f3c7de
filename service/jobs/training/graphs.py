"""Compiles the graphs that a training job's capture has found, before any rank has its device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ....compiler.errors import Overloaded, OverQuota, RelayError
from ...admission.admit import Admission
from ...admission.saved_requests import SavedRequests
from ...base.async_tasks import run_together
from ...cache.artifact_cache import ArtifactCache
from ...compile.dispatcher import Dispatcher
from ...compile.followers import Followers
from ...storage.redis.retry import retry_while_down

_CONCURRENT = 16
_MOST_PAUSE_SECONDS = 60.0
"""The longest pause before a compile that was refused for now is requested again. A compile that a quota refuses for
longer is given up."""

OnCompiled = Callable[[bool, str], Awaitable[None]]
"""Called for each graph: whether it was compiled now, and why it failed or ''."""


@dataclass(frozen=True)
class TrainingGraphCompiler:
    """Compiles the graphs of one namespace's training jobs."""

    cache: ArtifactCache
    dispatcher: Dispatcher
    followers: Followers
    admission: Admission
    saved_requests: SavedRequests

    async def compile(self, bodies: Sequence[bytes], *, source: bool, on_compiled: OnCompiled) -> None:
        """Compile what the cache lacks. `on_compiled` also gets graphs that fail. Raises what `on_compiled` raises."""
        free = asyncio.Semaphore(_CONCURRENT)
        reporting = asyncio.Lock()

        async def one(body: bytes) -> None:
            async with free:
                try:
                    fresh, why = await self._one(body, source=source), ""
                except RelayError as error:
                    fresh, why = False, error.message
            async with reporting:
                await on_compiled(fresh, why)

        try:
            await run_together(*map(one, bodies))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _one(self, body: bytes, *, source: bool) -> bool:
        """Whether the graph was compiled now. Raises the compile's error."""
        request = await self.admission.parse(body)
        fresh = False
        while True:
            if await retry_while_down(lambda: self.cache.lookup(request.key, "fetch")) is not None:
                return fresh
            if request.kernels and not source:
                raise RelayError(
                    f"who began the job may not send source: the Triton kernel {request.kernels[0]!r}"
                )
            try:
                answer = await retry_while_down(lambda: self.dispatcher.ask(request, body, finish=False))
            except (Overloaded, OverQuota) as error:
                pause = error.retry_after or 5
                if isinstance(error, OverQuota) and pause > _MOST_PAUSE_SECONDS:
                    raise  # it may take hours; ranks compile it themselves
                await asyncio.sleep(max(1.0, min(pause, _MOST_PAUSE_SECONDS)))
                continue
            if answer == "start":
                await self.saved_requests.note(request.key, body)
            if answer != "hit":
                fresh = True
                await self.followers.follow(request.key)
