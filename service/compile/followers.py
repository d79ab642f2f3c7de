"""Stage 9: followers of a compile in this process. One task reads its events for all of them.

The task also announces that a client waits, and has the compile queued again if Redis has lost it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import structlog

from ...compiler.api import compiles
from ...compiler.errors import from_code
from ..base.async_tasks import is_set_within
from ..base.settings import ServiceSettings
from ..storage.redis.notifications import Notifications
from ..storage.redis.retry import redis_errors_logged
from ..storage.redis.streams import STREAM_START, stream_order
from .events import CompileEvent, CompileEvents

log = structlog.get_logger(__name__)

_LOST_LEASE_PERIODS = 3
"""A compile of which Redis says for this many periods of a lease that it does not know it is given up."""
_OUTAGE_SECONDS = 60.0
"""And so is one while Redis says nothing at all for so long: a failover takes half of it."""


class FollowedCompile:
    """What is known of a compile. `ending` is set once no more events will come.

    finished: the last event says how it ended. Without one: cached (the artifact is there), lost (no trace is left).
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: wakes its followers."""
        self._wake = wake
        self.events: list[CompileEvent] = []
        self.ending: Literal["", "finished", "cached", "lost"] = ""
        self.position = 0
        """Where it stands in the queue, once it has waited for some seconds; 0: nothing is known."""
        self.followers = 0
        self.task: asyncio.Task[None] | None = None

    def after(self, event_id: str) -> list[CompileEvent]:
        return [event for event in self.events if stream_order(event.id) > stream_order(event_id)]

    @property
    def queued(self) -> bool:
        """Whether nobody has taken it yet."""
        return all(event.progress.stage == "queued" for event in self.events)

    def stands_at(self, position: int) -> None:
        if position != self.position:
            self.position = position
            self._wake()

    def add(self, events: list[CompileEvent], ending: Literal["", "finished", "cached", "lost"] = "") -> None:
        self.events += events
        self.ending = "finished" if events and events[-1].last else ending
        self._wake()


class Followers:
    def __init__(
        self,
        events: CompileEvents,
        notifications: Notifications,
        settings: ServiceSettings,
        ask_again: Callable[[str], Awaitable[bool]],
    ) -> None:
        """ask_again: queues a key's compile again, if it can. Raises RedisError."""
        self._events = events
        self._notifications = notifications
        self._ask_again = ask_again
        self._queued_seconds = (
            settings.compile_deadline_seconds + settings.lease_seconds * _LOST_LEASE_PERIODS
        )
        self._lost_seconds = settings.lease_seconds * _LOST_LEASE_PERIODS
        self._again_seconds = settings.lease_seconds
        self._poll_seconds = min(
            settings.keepalive_seconds, settings.lease_seconds / 2, settings.abandon_seconds / 3
        )
        self._presence_seconds = settings.abandon_seconds
        self._open: dict[str, FollowedCompile] = {}

    @asynccontextmanager
    async def watch(self, key: str) -> AsyncIterator[FollowedCompile]:
        """Follows `key` until the context is left. When the last follower leaves, the compile's holder can see it."""
        watch = self._open.get(key)
        if watch is None or watch.ending:
            watch = self._open[key] = FollowedCompile(
                partial(self._notifications.wake, self.notification(key))
            )
            watch.task = asyncio.create_task(self._poll(key, watch), name=f"watch {key[:12]}")
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

    def notification(self, key: str) -> str:
        """What wakes the followers of `key` in this process, once more of its compile is known."""
        return f"followed:{key}"

    async def follow(
        self, key: str, on_progress: Callable[[compiles.CompileProgress], Awaitable[None]] | None = None
    ) -> None:
        """Returns at the compile's end; calls `on_progress` with its progress until then. Raises its error."""
        seen = 0
        async with self.watch(key) as watch, self._notifications.woken(self.notification(key)) as changed:
            while True:
                changed.clear()
                for event in watch.events[seen:]:
                    seen += 1
                    if (error := event.error) is not None:
                        raise from_code(error.code, error.message, error.hint)
                    if on_progress is not None:
                        await on_progress(event.progress)
                if watch.ending:
                    return
                await changed.wait()

    async def _poll(self, key: str, watch: FollowedCompile) -> None:
        waiter, after = uuid.uuid4().hex, STREAM_START
        last_answer = last_leased = time.monotonic()  # when Redis answered, and the compile was known to run
        unknown_since = math.inf  # since when each answer has been that Redis knows nothing of the compile
        last_announced = 0.0  # when a waiter was last announced
        refused = False  # whether Redis took no writes then: nobody can take what is queued
        try:
            async with self._notifications.woken(key) as wake:
                # a cancellation can get lost (base/async_tasks.py), so the condition is read each time
                while watch.followers and not watch.ending:
                    wake.clear()
                    asked = time.monotonic()
                    with redis_errors_logged("events_delayed", key=key):
                        snapshot = await self._events.snapshot(key, after)
                        last_answer = time.monotonic()
                        if snapshot.events:
                            watch.add(snapshot.events)
                            after = snapshot.events[-1].id
                        elif snapshot.cached:
                            watch.add([], "cached")
                        if snapshot.events or snapshot.leased:
                            last_leased = last_answer
                        waits = watch.queued and not (snapshot.events or snapshot.leased)
                        watch.stands_at(snapshot.position if waits else 0)
                        if (
                            snapshot.events
                            or snapshot.cached
                            or snapshot.leased
                            or (snapshot.pending and not (refused and watch.queued))
                            or (
                                last_answer - unknown_since > self._again_seconds
                                and await self._ask_again(key)
                            )
                        ):
                            unknown_since = math.inf
                        else:
                            unknown_since = min(unknown_since, last_answer)
                        if time.monotonic() - last_announced > self._presence_seconds / 3:
                            refused = True
                            await self._events.announce_waiter(key, waiter, self._presence_seconds)
                            last_announced, refused = time.monotonic(), False
                    now = time.monotonic()
                    if last_answer < asked:
                        unknown_since = math.inf
                    lost = (
                        now - unknown_since > self._lost_seconds
                        or now - last_answer > _OUTAGE_SECONDS
                        or now - last_leased > self._queued_seconds
                    )
                    if lost and not watch.ending:
                        watch.add([], "lost")
                    if not watch.ending:
                        await is_set_within(wake, self._poll_seconds)
        except Exception:  # an event that cannot be read, say: whoever waits must not wait for ever
            log.exception("compile_not_followed", key=key)
            watch.add([], "lost")
        finally:
            with redis_errors_logged("waiter_not_removed", key=key):  # it expires by itself
                await self._events.remove_waiter(key, waiter)
