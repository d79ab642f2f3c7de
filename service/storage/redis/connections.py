"""The connections of a process to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from datetime import timedelta
from typing import Any, Literal, Protocol, cast, overload

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline, PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.typing import EncodableT, FieldT

from ...base.settings import ServiceSettings
from .fair_pool import FairConnectionPool
from .primary import names_primary, names_replicas, primary_pool
from .retry import REDIS_OUTAGES, resets_are_outages

_REDIS_CONNECTIONS = 64
_LEASE_CONNECTIONS = 4
_REDIS_RETRIES = 3
_QUEUE_TIMES = 3
_TRIED_AGAIN = tuple(error for error in REDIS_OUTAGES if error is not RedisTimeoutError)

_Name = str | bytes
_Value = str | bytes | int | float


class RedisClient(Protocol):
    """What the service calls of redis-py's Redis, with the types that hold without `decode_responses`: redis-py's own
    also allow for str in each answer. Every method raises RedisError."""

    @property
    def connection_pool(self) -> ConnectionPool: ...
    async def aclose(self) -> None: ...
    async def ping(self) -> bool: ...
    async def time(self) -> tuple[int, int]: ...
    def pipeline(self, transaction: bool) -> Pipeline: ...
    def pubsub(self) -> PubSub: ...
    async def publish(self, channel: str, message: str) -> int: ...
    def register_script(self, script: str) -> AsyncScript: ...
    async def transaction(self, func: Callable[[Pipeline], Awaitable[None]], *watches: str) -> list[Any]: ...

    async def delete(self, *names: str) -> int: ...
    async def exists(self, *names: str) -> int: ...
    async def get(self, name: str) -> bytes | None: ...
    async def mget(self, keys: Sequence[str]) -> list[bytes | None]: ...
    def scan_iter(self, match: bytes, count: int) -> AsyncIterator[bytes]: ...
    async def unlink(self, *names: bytes) -> int: ...
    async def set(
        self, name: str, value: _Value, *, px: int | timedelta, nx: bool = False
    ) -> bool | None: ...

    async def hdel(self, name: str, *keys: _Name) -> int: ...
    async def hget(self, name: str, key: str) -> bytes | None: ...
    async def hgetall(self, name: str) -> dict[bytes, bytes]: ...
    async def hincrby(self, name: str, key: str, amount: int) -> int: ...
    async def hkeys(self, name: str) -> list[bytes]: ...
    async def hlen(self, name: str) -> int: ...
    async def hmget(self, name: _Name, keys: str | Sequence[str], *more: str) -> list[bytes | None]: ...
    async def hscan(self, name: str, cursor: int, *, count: int) -> tuple[int, dict[bytes, bytes]]: ...
    def hscan_iter(self, name: str, *, count: int) -> AsyncIterator[tuple[bytes, bytes]]: ...
    async def hset(self, name: str, *, mapping: Mapping[str, _Value]) -> int: ...
    async def hsetnx(self, name: str, key: str, value: _Value) -> bool: ...

    async def smembers(self, name: str) -> Set[bytes]: ...

    async def xadd(
        self, name: str, fields: dict[FieldT, EncodableT], *, maxlen: int, approximate: bool
    ) -> bytes: ...
    async def xrange(self, name: str, *, min: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]: ...
    async def xrevrange(
        self, name: str, max: str, min: str, *, count: int
    ) -> list[tuple[bytes, dict[bytes, bytes]]]: ...
    async def xtrim(self, name: str, *, maxlen: int, approximate: bool) -> int: ...

    async def zadd(self, name: str, mapping: Mapping[str, float], *, nx: bool) -> int: ...
    async def zcount(self, name: str, min: float | str, max: float | str) -> int: ...
    @overload
    async def zrange(self, name: str, start: int, end: int) -> list[bytes]: ...
    @overload
    async def zrange(
        self, name: str, start: float | str, end: float | str, *, withscores: Literal[True], **options: Any
    ) -> list[tuple[bytes, float]]: ...
    async def zrem(self, name: str, *values: _Name) -> int: ...
    async def zrevrange(self, name: str, start: int, end: int) -> list[bytes]: ...


class CountedRetry(Retry):
    """Tries again at once, but not where no answer came in time: whoever asked has waited long enough. on_error: called
    with the kind of each error that is left after all tries. Every call to Redis passes here."""

    def __init__(self, on_error: Callable[[str], object]) -> None:
        super().__init__(
            ExponentialWithJitterBackoff(base=0.02, cap=0.25), _REDIS_RETRIES, supported_errors=_TRIED_AGAIN
        )
        self._on_error = on_error

    def __deepcopy__(self, memo: dict[int, Any]) -> CountedRetry:
        """Each connection has a copy."""
        return CountedRetry(self._on_error)

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()

        async def attempt() -> Any:
            with resets_are_outages():
                answer = await do()
            if task.cancelling() > before:  # up to Python 3.11, asyncio.wait_for inside may have lost it
                raise asyncio.CancelledError
            return answer

        try:
            return await super().call_with_retry(attempt, *arguments, **options)
        except (NoScriptError, WatchError):  # answers that callers expect
            raise
        except (RedisError, OSError, TimeoutError) as error:
            self._on_error(type(error).__name__)
            raise


def connect(settings: ServiceSettings, on_error: Callable[[str], object] = lambda kind: None) -> RedisClient:
    """A client of the primary, which reconnects by itself. It waits at most `redis_timeout_seconds` for an answer, and
    three times that for a free connection: a burst waits its turn. on_error: see CountedRetry. Raises SettingsError."""
    url, options = settings.redis_url, _options(settings, on_error)
    pool = (
        primary_pool(url, prefix=settings.redis_prefix, **options)
        if names_primary(url)
        else FairConnectionPool.from_url(url, **options)
    )
    return cast(RedisClient, Redis.from_pool(pool))


def connect_replicas(
    settings: ServiceSettings, on_error: Callable[[str], object] = lambda kind: None
) -> Redis | None:
    """A client that reads from any replica, if the URL names sentinels, which know them. Raises SettingsError."""
    if not names_replicas(settings.redis_url):
        return None
    options = {**_options(settings, on_error), "is_master": False}
    return Redis.from_pool(primary_pool(settings.redis_url, prefix=settings.redis_prefix, **options))


def _options(settings: ServiceSettings, on_error: Callable[[str], object]) -> dict[str, Any]:
    timeout = settings.redis_timeout_seconds
    options: dict[str, Any] = {
        "max_connections": _REDIS_CONNECTIONS,
        "for_leases": _LEASE_CONNECTIONS,
        "timeout": _QUEUE_TIMES * timeout,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": CountedRetry(on_error),
        # also of a primary that became a replica: its name leads to the new one
        "retry_on_error": list(_TRIED_AGAIN),
    }
    if settings.redis_url.startswith(
        "rediss"
    ):  # redis-py before 6 takes a certificate for any name otherwise
        options["ssl_check_hostname"] = True
    return options
