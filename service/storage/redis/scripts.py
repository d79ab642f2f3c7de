"""The Lua scripts of storage/redis/lua/ as callables. Calls that are made together cross to Redis together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .connections import RedisClient
from .fair_pool import leases_are_meant
from .retry import write_refusal

Script = Callable[..., Awaitable[Any]]

_NO_ANSWER = (RedisConnectionError, RedisTimeoutError)
_READING = {"authenticate", "namespace_exists", "lookup"}
"""What a hit needs."""
_CONNECTIONS = 2
"""That wait for scripts' answers at a time; calls that come meanwhile go together as soon as one is free."""
_TOGETHER = 128


class _Call(NamedTuple):
    script: AsyncScript
    keys: Sequence[str]
    args: Sequence[Any]
    answer: asyncio.Future[Any]


class Scripts:
    """The Lua scripts, bound to a client: `scripts.publish(keys=[...], args=[...])` runs lua/cache/publish.lua.

    Each begins with lua/shared/prelude.lua, and is loaded again by itself when Redis has forgotten it. A Redis that
    refuses writes is left for the one that is the primary by now. Raises RedisError.

    Calls of many requests share a few connections and their round trips: with a connection for each call, most of a
    hit's time went to them, and of a thousand requests at once some waited for one until it was too late.
    """

    def __init__(self, redis: RedisClient, replicas: Redis | None = None) -> None:
        """replicas: what a hit needs is read there while the primary does not answer."""
        self._redis = redis
        self._replicas = replicas
        self._away = False
        """Whether the primary gave no answer to the last call."""
        self._calls: deque[_Call] = deque()
        self._senders: set[asyncio.Task[Any] | None] = set()
        folder = resources.files(__package__) / "lua"
        prelude = (folder / "shared" / "prelude.lua").read_text("utf-8")
        self._scripts: dict[str, Script] = {
            (name := file.name.removesuffix(".lua")): partial(
                self._read if name in _READING else self._on_primary,
                redis.register_script(prelude + file.read_text("utf-8")),
            )
            for group in folder.iterdir()
            if group.name != "shared"
            for file in group.iterdir()
        }

    def __getattr__(self, name: str) -> Script:
        try:
            return self._scripts[name]
        except KeyError:
            raise AttributeError(f"there is no {name}.lua") from None

    async def _read(self, script: AsyncScript, *, keys: Sequence[str] = (), args: Sequence[Any] = ()) -> Any:
        if self._replicas is not None and self._away:
            with suppress(RedisError):
                return await script(keys, args, client=self._replicas)
        try:
            return await self._on_primary(script, keys=keys, args=args)
        except _NO_ANSWER:
            if self._replicas is None:
                raise
            return await script(keys, args, client=self._replicas)

    async def _on_primary(
        self, script: AsyncScript, *, keys: Sequence[str] = (), args: Sequence[Any] = ()
    ) -> Any:
        call = self._alone if leases_are_meant() else self._together  # leases have connections of their own
        try:
            answer = await call(script, keys, args)
        except _NO_ANSWER:
            self._away = True
            raise
        self._away = False
        return answer

    async def _together(self, script: AsyncScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        call = _Call(script, keys, args, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        if len(self._senders) < _CONNECTIONS:
            sender = asyncio.create_task(self._send(), name="send scripts")
            self._senders.add(sender)
        return await call.answer

    async def _send(self) -> None:
        try:
            while self._calls:
                await self._send_together()
        finally:  # at once: a callback would run later, and a call meanwhile would find no sender
            self._senders.discard(asyncio.current_task())

    async def _send_together(self) -> None:
        calls = [self._calls.popleft() for _ in range(min(len(self._calls), _TOGETHER))]
        try:
            await self._answer([call for call in calls if not call.answer.done()])
        except Exception as error:
            self._fail(calls, error)
        finally:  # cancelled, when the loop ends
            for call in calls:
                call.answer.cancel()

    async def _answer(self, calls: list[_Call]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            answers = await pipe.execute(raise_on_error=False)
        for call, answer in zip(calls, answers, strict=True):
            try:
                if isinstance(answer, ResponseError) and _worth_another_call(answer):
                    answer = await self._alone(call.script, call.keys, call.args)
            except Exception as error:
                answer = error
            if isinstance(answer, Exception):
                self._fail([call], answer)
            elif not call.answer.done():
                call.answer.set_result(answer)

    def _fail(self, calls: list[_Call], error: Exception) -> None:
        if isinstance(error, RedisTimeoutError):  # calls that wait for a connection have waited as long
            calls = [*calls, *self._calls]
            self._calls.clear()
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(error)

    async def _alone(self, script: AsyncScript, keys: Sequence[str], args: Sequence[Any]) -> Any:
        try:
            return await script(keys, args)
        except ResponseError as error:
            if not write_refusal(error):
                raise
        # Maybe it is the primary no more. The client cannot always tell (Redis 6.2 says READONLY in the middle of a
        # script's error, and one that lost its replicas says NOREPLICAS), and kept the connection.
        await self._redis.connection_pool.disconnect(inuse_connections=False)
        return await script(keys, args)


def _worth_another_call(error: ResponseError) -> bool:
    """Redis has forgotten the script, or refuses writes: no step of it was done."""
    return isinstance(error, NoScriptError) or bool(write_refusal(error))
