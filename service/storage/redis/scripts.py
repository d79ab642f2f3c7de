"""The Lua scripts of storage/redis/lua/ as callables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, ResponseError

Script = Callable[..., Awaitable[Any]]


class Scripts:
    """The Lua scripts, bound to a client: `scripts.publish(keys=[...], args=[...])` runs lua/cache/publish.lua.

    Each begins with lua/shared/prelude.lua, and is loaded again by itself when Redis has forgotten it. A Redis that has
    become a replica is left for the one to which its name leads by now. Raises RedisError.
    """

    def __init__(self, redis: Redis) -> None:
        folder = resources.files(__package__) / "lua"
        prelude = (folder / "shared" / "prelude.lua").read_text("utf-8")
        self._scripts: dict[str, Script] = {
            file.name.removesuffix(".lua"): partial(
                _on_primary, redis, redis.register_script(prelude + file.read_text("utf-8"))
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


async def _on_primary(redis: Redis, script: Script, **arguments: Any) -> Any:
    try:
        return await script(**arguments)
    except ResponseError as error:
        if "READONLY" not in str(error):
            raise
    # Redis 6.2 says it in the middle of a script's error, so the client did not know it and kept the connection.
    await redis.connection_pool.disconnect(inuse_connections=False)
    try:
        return await script(**arguments)
    except ResponseError as error:
        raise (ReadOnlyError(str(error)) if "READONLY" in str(error) else error) from None
