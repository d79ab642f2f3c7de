"""The graphs that a training job's capture has found, compiled before any rank has its device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ....compiler.errors import Overloaded, OverQuota, RelayError
from ...admission.admit import Admission
from ...admission.saved_requests import SavedRequests
from ...base.async_tasks import run_together
from ...cache.artifact_cache import ArtifactCache
from ...compile.dispatcher import Dispatcher
from ...compile.followers import Followers
from ...storage.redis.retry import retry_while_down

_AT_ONCE = 16
_PATIENCE = 60.0
"""The longest pause before a compile that was refused for now is asked for again. What a quota refuses for longer is
not asked for again."""

Told = Callable[[bool, str], Awaitable[None]]
"""Of each graph: whether it was compiled now, and why it could not be ('': it could)."""


class TrainingGraphCompiler:
    """One namespace's."""

    def __init__(
        self,
        cache: ArtifactCache,
        dispatcher: Dispatcher,
        watches: Followers,
        intake: Admission,
        kept: SavedRequests,
    ) -> None:
        self._cache = cache
        self._dispatcher = dispatcher
        self._watches = watches
        self._intake = intake
        self._kept = kept

    async def compile(self, bodies: Sequence[bytes], *, source: bool, told: Told) -> None:
        """Have all of them in the cache. A graph that does not compile is told, no more. Raises what `told` raises."""
        free = asyncio.Semaphore(_AT_ONCE)
        telling = asyncio.Lock()

        async def one(body: bytes) -> None:
            async with free:
                try:
                    fresh, why = await self._one(body, source=source), ""
                except RelayError as error:
                    fresh, why = False, error.message
            async with telling:
                await told(fresh, why)

        try:
            await run_together(*map(one, bodies))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _one(self, body: bytes, *, source: bool) -> bool:
        """Whether the cache did not have it. Raises the compile's error."""
        ask = await self._intake.parse(body)
        fresh = False
        while True:
            if await retry_while_down(lambda: self._cache.lookup(ask.key, "fetch")) is not None:
                return fresh
            if ask.kernels and not source:
                raise RelayError(
                    f"who began the job may not send source: the Triton kernel {ask.kernels[0]!r}"
                )
            try:
                answer = await retry_while_down(lambda: self._dispatcher.ask(ask, body, finish=False))
            except (Overloaded, OverQuota) as error:
                pause = error.retry_after or 5
                if isinstance(error, OverQuota) and pause > _PATIENCE:
                    raise  # hours: ranks do as every client of this namespace does
                await asyncio.sleep(max(1.0, min(pause, _PATIENCE)))
                continue
            if answer == "start":
                await self._kept.note(ask.key, body)
            if answer != "hit":
                fresh = True
                await self._watches.follow(ask.key)
