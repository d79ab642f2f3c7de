"""The Lua scripts of storage/redis/lua/ as callables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from redis.asyncio import Redis

Script = Callable[..., Awaitable[Any]]


class Scripts:
    """The Lua scripts, bound to a client: `scripts.publish(keys=[...], args=[...])` runs lua/cache/publish.lua.

    Each is loaded again by itself when Redis has forgotten it.
    """

    def __init__(self, redis: Redis) -> None:
        groups = (resources.files(__package__) / "lua").iterdir()
        self._scripts: dict[str, Script] = {
            file.name.removesuffix(".lua"): redis.register_script(file.read_text("utf-8"))
            for group in groups
            for file in group.iterdir()
        }

    def __getattr__(self, name: str) -> Script:
        try:
            return self._scripts[name]
        except KeyError:
            raise AttributeError(f"there is no {name}.lua") from None
