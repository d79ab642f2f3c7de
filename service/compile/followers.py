"""One look at a compile for everyone in this process who waits for it: a key in, its events out as they come.

However many clients follow a key here, one task reads its events, says that somebody waits, and takes the
compile over when its holder is found dead.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

import structlog
from redis.exceptions import RedisError

from ...compiler.api import compiles
from ...compiler.errors import from_code
from ..settings import ServiceSettings
from ..storage.redis.notifications import Notifications
from ..storage.redis.streams import STREAM_START, stream_order
from .dispatcher import Dispatcher
from .events import CompileEvent, CompileEvents

log = structlog.get_logger(__name__)

_LOST_LEASE_PERIODS = 3
"""A compile without a lease for this many periods, that nobody can take over, is given up."""


class FollowedCompile:
    """What is known of a compile. `ending` is set once no more events will come.

    told: the last event tells the end. Without one: cached (the artifact is there), lost (no trace is left).
    """

    def __init__(self) -> None:
        self.events: list[CompileEvent] = []
        self.ending: Literal["", "told", "cached", "lost"] = ""
        self.changed = asyncio.Event()
        """Set at the next change, and replaced by a new one; take it before looking."""
        self.followers = 0
        self.task: asyncio.Task[None] | None = None

    def after(self, event_id: str) -> list[CompileEvent]:
        return [event for event in self.events if stream_order(event.id) > stream_order(event_id)]

    def tell(self, events: list[CompileEvent], ending: Literal["", "told", "cached", "lost"] = "") -> None:
        self.events += events
        self.ending = "told" if events and events[-1].last else ending
        self.wake()

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Followers:
    def __init__(
        self, events: CompileEvents, wakes: Notifications, dispatcher: Dispatcher, settings: ServiceSettings
    ) -> None:
        self._events = events
        self._wakes = wakes
        self._dispatcher = dispatcher
        self._patience = settings.lease_seconds * _LOST_LEASE_PERIODS
        self._pause = min(
            settings.keepalive_seconds, settings.lease_seconds / 2, settings.abandon_seconds / 3
        )
        self._presence_seconds = settings.abandon_seconds
        self._open: dict[str, FollowedCompile] = {}

    @asynccontextmanager
    async def watch(self, key: str) -> AsyncIterator[FollowedCompile]:
        """Follow `key` until the context is left; when the last one leaves, the compile's holder is told."""
        watch = self._open.get(key)
        if watch is None or watch.ending:
            watch = self._open[key] = FollowedCompile()
            watch.task = asyncio.create_task(self._look(key, watch), name=f"watch {key[:12]}")
        watch.followers += 1
        try:
            yield watch
        finally:
            watch.followers -= 1
            if watch.followers == 0:
                if self._open.get(key) is watch:
                    del self._open[key]
                assert watch.task is not None
                watch.task.cancel()

    async def follow(
        self, key: str, heard: Callable[[compiles.CompileProgress], Awaitable[None]] | None = None
    ) -> None:
        """Return at the compile's end; `heard` what it tells until then. Raises its error."""
        told = 0
        async with self.watch(key) as watch:
            while True:
                changed = watch.changed
                for event in watch.events[told:]:
                    told += 1
                    if (error := event.error) is not None:
                        raise from_code(error.code, error.message, error.hint)
                    if heard is not None:
                        await heard(event.progress)
                if watch.ending:
                    return
                await changed.wait()

    def wake_all(self) -> None:
        """Make every follower in this process look up (the gateway stops)."""
        for watch in self._open.values():
            watch.wake()

    async def _look(self, key: str, watch: FollowedCompile) -> None:
        me, after = uuid.uuid4().hex, STREAM_START
        well = time.monotonic()  # when the compile was last known to be on its way
        present = 0.0  # when it was last said that somebody waits here
        try:
            async with self._wakes.woken(key) as wake:
                while watch.followers and not watch.ending:  # a cancellation may be lost: base/async_tasks.py
                    wake.clear()
                    try:
                        glance = await self._events.glance(key, after)
                        if glance.events:
                            watch.tell(glance.events)
                            after = glance.events[-1].id
                            well = (
                                time.monotonic()
                            )  # or there may be news at every look until it counts as lost
                        elif glance.cached:
                            watch.tell([], "cached")
                        elif glance.leased or await self._carried_on(key):
                            well = time.monotonic()
                        if time.monotonic() - present > self._presence_seconds / 3:
                            await self._events.wait_here(key, me, self._presence_seconds)
                            present = time.monotonic()
                    except RedisError as error:
                        log.warning("events_delayed", key=key, error=str(error))
                    if not watch.ending and time.monotonic() - well > self._patience:
                        watch.tell([], "lost")
                    if not watch.ending:
                        await _wait(wake, self._pause)
        finally:
            try:
                await self._events.leave(key, me)
            except RedisError as error:
                log.warning("waiter_not_removed", key=key, error=str(error))  # it expires by itself

    async def _carried_on(self, key: str) -> bool:
        """Whether this gateway compiles `key`, maybe since now."""
        return self._dispatcher.holds(key) or await self._dispatcher.take_over(key)


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return
