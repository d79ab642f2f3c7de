"""Waiting for a condition: looked at again and again, for at most so many seconds."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    seconds: float = 60.0,
    *,
    pause: float = 0.02,
    told: Callable[[], object] = str,
) -> T:
    """What `condition` returns, once that is true. told: what a failure adds to its message."""
    for found in _looks(condition, seconds, told):
        if found:
            return found
        time.sleep(pause)
    raise AssertionError


async def until(
    condition: Callable[[], Any],
    seconds: float = 60.0,
    *,
    pause: float = 0.02,
    told: Callable[[], object] = str,
) -> Any:
    """As `wait_until`, also for what is awaited; the event loop goes on meanwhile."""
    for looked in _looks(condition, seconds, told):
        found = await looked if inspect.isawaitable(looked) else looked
        if found:
            return found
        await asyncio.sleep(pause)
    raise AssertionError


def _looks(condition: Callable[[], T], seconds: float, told: Callable[[], object]) -> Iterator[T]:
    end = time.monotonic() + seconds
    for _ in itertools.count():
        late = time.monotonic() > end
        yield condition()
        assert not late, f"it did not happen within {seconds:g} s {told()}"
