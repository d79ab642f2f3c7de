"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio

_AGAIN_SECONDS = 2.0


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel `tasks` until each of them is over; what they raised stays theirs.

    Once is not enough: up to Python 3.11, asyncio.wait_for (with which redis-py sends) loses a cancellation that
    comes in the moment in which what it waits for is done, and the task goes on.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        over, left = await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        for task in over:
            if not task.cancelled():
                task.exception()  # so that asyncio does not call it unseen
