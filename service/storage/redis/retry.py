"""What to do when Redis is down: repeat the call, for work that can wait, or log the error, for work that can fail."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from redis.exceptions import (
    AskError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = structlog.get_logger(__name__)

T = TypeVar("T")

REDIS_OUTAGES = (
    RedisConnectionError,
    RedisTimeoutError,
    ReadOnlyError,
    *(AskError, ClusterDownError, TryAgainError),  # of a Redis Cluster; MovedError is an AskError
)
"""Errors of a Redis that restarts or fails over, which pass. So do refusals to write; any other would stay the same."""
_REFUSALS = {
    "READONLY": "it is a replica",
    "NOREPLICAS": "too few replicas follow it",
    "MISCONF": "it cannot save its data, as on a full disk",
    "OOM": "its memory is full",
}
"""Redis' code to what it means. Redis 6.2 has the code of a script's error in the middle of its text."""
_CODES: dict[type[BaseException], str] = {ReadOnlyError: "READONLY", OutOfMemoryError: "OOM"}
"""Codes of redis-py's own errors."""
_RETRY_SECONDS = 0.5


@contextmanager
def resets_are_outages() -> Iterator[None]:
    """Redis may end between two commands of a connection. For the second one asyncio raises an OSError, but uvloop a
    RuntimeError, which redis-py does not know."""
    try:
        yield
    except RuntimeError as error:
        if "the handler is closed" not in str(error):
            raise
        raise RedisConnectionError("the connection was closed") from error


def write_refusal(error: BaseException) -> str:
    """Why Redis refuses to write, or '' if the error is another one."""
    code = _CODES.get(type(error), "")
    if not code and isinstance(error, ResponseError):
        code = next((code for code in _REFUSALS if re.search(rf"\b{code}\b", str(error))), "")
    return f"{_REFUSALS[code]} ({code})" if code else ""


async def retry_while_down(
    call: Callable[[], Awaitable[T]],
    *,
    seconds: float = math.inf,
    longest_pause: float = _RETRY_SECONDS,
    errors: tuple[type[Exception], ...] = REDIS_OUTAGES,
) -> T:
    """What `call` returns, once it raises none of `errors`, nor a refusal to write. The pause between two tries doubles
    up to `longest_pause`. Raises the last error after `seconds`."""
    until = time.monotonic() + seconds
    pause = _RETRY_SECONDS
    while True:
        try:
            return await call()
        except Exception as error:
            if not isinstance(error, errors) and not write_refusal(error):
                raise
            left = until - time.monotonic()
            if left <= 0:
                raise
            log.warning("call_delayed", error=f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(max(_RETRY_SECONDS, min(pause, left)))
            pause = min(2 * pause, longest_pause)


@contextmanager
def redis_errors_logged(event: str, **fields: Any) -> Iterator[None]:
    """Logs `event` if Redis fails inside, and goes on."""
    try:
        yield
    except RedisError as error:
        log.warning(event, error=str(error), **fields)
