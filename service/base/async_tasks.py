"""Ending asyncio tasks for certain, and keeping those going that run in the background."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")

AGAIN_SECONDS = 2.0
RESTART_SECONDS = 5.0
_LAG_EVERY_SECONDS = 0.5
_SHOWN_SECONDS = 600.0
"""How long the failure of a task is shown, unless it goes well before."""


class TaskSupervisor:
    """Background tasks: an error of one is logged, counted and shown, and the task goes on.

    on_failure: called with the task's name.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._failed: dict[str, tuple[str, float]] = {}

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Ends the block at an error of task `name`."""
        try:
            yield
        except Exception as error:
            self.note(name, error)
            log.exception("background_task_failed", task=name)
        else:
            self.note(name, None)

    def note(self, name: str, error: Exception | None) -> None:
        """Task `name`, which goes on by itself, has failed; None: it goes well."""
        if error is None:
            self._failed.pop(name, None)
        else:
            self._failed[name] = type(error).__name__, time.monotonic()
            self._on_failure(name)

    async def run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` until it returns; after an error, once more."""
        over = False
        while not over:
            with self.guard(name):
                await work()
                over = True
            if not over:
                await asyncio.sleep(RESTART_SECONDS)

    def failing(self) -> dict[str, str]:
        """What failed last and has not gone well since, by name of the task: the kind of its error."""
        now = time.monotonic()
        return {name: kind for name, (kind, at) in self._failed.items() if now - at < _SHOWN_SECONDS}


class Recent(Generic[T]):
    """One value for all who ask within `seconds`, however many."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = -math.inf
        self._value: T | None = None
        self._making = asyncio.Lock()

    async def get(self, make: Callable[[], Awaitable[T]]) -> T:
        """Raises what `make` raises."""
        async with self._making:
            if self._value is None or time.monotonic() - self._at > self._seconds:
                self._value, self._at = await make(), time.monotonic()
            return self._value


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels `tasks` until each of them is over, and raises nothing of theirs. If the caller is cancelled, it still
    waits for that.

    Once is not enough: up to Python 3.11, asyncio.wait_for (which libraries use) loses a cancellation that
    comes at the moment when what it waits for is done.
    """
    left = {task for task in tasks if not task.done()}
    cancelled = False
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=AGAIN_SECONDS)
        except asyncio.CancelledError:
            cancelled = True
        over = {task for task in left if task.done()}
        left -= over
        for task in over:
            if not task.cancelled():
                task.exception()  # so that asyncio does not call it unseen
    if cancelled:
        raise asyncio.CancelledError


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Runs all of `works` at once. The first that fails ends the others, and so does a cancellation, by `end`:
    asyncio's TaskGroup cancels each only once. Raises an ExceptionGroup of what they raised."""
    tasks = [asyncio.create_task(work) for work in works]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end(*tasks)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise BaseExceptionGroup("some of what was done together failed", errors)


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Calls `observe` with how many seconds late the event loop was, again and again until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_EVERY_SECONDS
        await asyncio.sleep(_LAG_EVERY_SECONDS)
        observe(max(0.0, loop.time() - due))


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for `event`, at most so long, and says whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
