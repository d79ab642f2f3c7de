"""The Lua scripts of storage/redis/lua/ as callables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from redis.asyncio import Redis

Script = Callable[..., Awaitable[Any]]


class Scripts:
    """The Lua scripts, bound to a client: `scripts.publish(keys=[...], args=[...])` runs lua/cache/publish.lua.

    Each begins with lua/shared/prelude.lua. Each is loaded again by itself when Redis has forgotten it.
    """

    def __init__(self, redis: Redis) -> None:
        folder = resources.files(__package__) / "lua"
        prelude = (folder / "shared" / "prelude.lua").read_text("utf-8")
        self._scripts: dict[str, Script] = {
            file.name.removesuffix(".lua"): redis.register_script(prelude + file.read_text("utf-8"))
            for group in folder.iterdir()
            if group.name != "shared"
            for file in group.iterdir()
        }

    def __getattr__(self, name: str) -> Script:
        try:
            return self._scripts[name]
        except KeyError:
            raise AttributeError(f"there is no {name}.lua") from None
