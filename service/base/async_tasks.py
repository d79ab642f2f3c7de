"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_AGAIN_SECONDS = 2.0


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels `tasks` until each of them is over, and raises nothing of theirs. If the caller is cancelled, it still
    waits for that.

    Once is not enough: up to Python 3.11, asyncio.wait_for (which redis-py uses to send) loses a cancellation that
    comes at the moment when what it waits for is done.
    """
    left = {task for task in tasks if not task.done()}
    cancelled = False
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=_AGAIN_SECONDS)
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


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for `event`, at most so long, and says whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
