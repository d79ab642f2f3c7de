"""The graphs that a training job's capture has found, compiled before any rank has its device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from ...compiler import wire
from ...compiler.errors import Overloaded, OverQuota, RelayError, from_code
from ..cache import Cache
from ..dispatch import OUTAGES, Dispatcher
from ..intake import Ask, Intake
from ..kept_requests import KeptRequests
from ..watch import Watches

log = structlog.get_logger(__name__)

T = TypeVar("T")

_AT_ONCE = 16
_RETRY_SECONDS = 0.5
_PATIENCE = 60.0
"""The longest pause before a compile that was refused for now is asked for again. What a quota refuses for longer is
not asked for again."""

Told = Callable[[bool, str], Awaitable[None]]
"""Of each graph: whether it was compiled now, and why it could not be ('': it could)."""


class TrainCompiler:
    """One namespace's."""

    def __init__(
        self,
        cache: Cache,
        dispatcher: Dispatcher,
        watches: Watches,
        intake: Intake,
        kept: KeptRequests,
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
            async with asyncio.TaskGroup() as group:
                for body in bodies:
                    group.create_task(one(body))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _one(self, body: bytes, *, source: bool) -> bool:
        """Whether the cache did not have it. Raises the compile's error."""
        ask = await self._intake.parse(body)
        fresh = False
        while True:
            if await patiently(lambda: self._cache.lookup(ask.key, "fetch")) is not None:
                return fresh
            if ask.kernels and not source:
                raise RelayError(
                    f"who began the job may not send source: the Triton kernel {ask.kernels[0]!r}"
                )
            try:
                answer = await patiently(lambda: self._dispatcher.ask(ask, body, finish=False))
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
                await self._followed(ask)

    async def _followed(self, ask: Ask) -> None:
        """Wait for the compile's end. Raises its error."""
        told = 0
        async with self._watches.watch(ask.key) as watch:
            while True:
                changed = watch.changed
                for event in watch.events[told:]:
                    told += 1
                    if event.error is not None:
                        raise _rebuilt(event.error)
                if watch.ending:
                    return
                await changed.wait()


def _rebuilt(error: wire.ErrorBody) -> RelayError:
    return from_code(error.code, error.message, error.hint)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` returns, once Redis is back if it is away."""
    while True:
        try:
            return await call()
        except OUTAGES as error:
            log.warning("train_waits", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
