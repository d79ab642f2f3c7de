"""Which artifacts scripts used, so that a client can fetch them ahead at a script's next start, and which sizes of its
inputs vary, so that it traces them as symbols at once.

Clients hash a script's name. A script is forgotten a month after its last run. The latest SCRIPTS of a namespace are
stored, with KEYS and compiles.SIZES_OF_A_SCRIPT of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...compiler.api import compiles
from ..storage.redis.connections import RedisClient
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

SCRIPTS = 2500
KEYS = 256
"""SCRIPTS with so many each take about 100 MB of Redis a namespace, and as much for sizes."""
_TTL_SECONDS = 30 * 24 * 3600
_BATCH = 1000
"""record_script_use.lua writes milliseconds times this, plus the position within one call."""


class ScriptHistory:
    def __init__(self, redis: RedisClient, keys: Keys, scripts: Scripts) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = scripts

    async def record(
        self, script: str, used: Sequence[str], varied: Sequence[str] = (), constant: Sequence[str] = ()
    ) -> None:
        """varied, constant: sizes that vary from now on, and sizes that no longer do."""
        limits = [_TTL_SECONDS * 1000, KEYS, compiles.SIZES_OF_A_SCRIPT, SCRIPTS]
        prefixes = [self._keys.script_prefix, self._keys.script_sizes_prefix]
        counts = [len(varied), len(constant)]
        await self._scripts.record_script_use(
            keys=[self._keys.script(script), self._keys.scripts, self._keys.script_sizes(script)],
            args=[script, *limits, *prefixes, *counts, *varied, *constant, *used],
        )

    async def hits(self, prefetched: Iterable[str]) -> dict[str, float]:
        """What to count for artifacts that were fetched ahead, and therefore not asked for when they were needed."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in prefetched:
                pipe.hget(self._keys.index(key), "seconds")
            found = [seconds_saved(seconds) for seconds in await pipe.execute() if seconds is not None]
        return {"requests": len(found), "hits": len(found), "seconds_saved": sum(found)}

    async def used_by(self, script: str) -> compiles.ScriptArtifacts:
        """What it used and the cache still offers: the latest run's first, in order of use."""
        name = self._keys.script(script)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zrange(name, 0, KEYS - 1, withscores=True)
            pipe.zrange(self._keys.script_sizes(script), 0, compiles.SIZES_OF_A_SCRIPT - 1)
            found, varied = await pipe.execute()
        if not found and not varied:
            return compiles.ScriptArtifacts([])
        ordered = [key for key, score in sorted(found, key=lambda pair: (-(pair[1] // _BATCH), pair[1]))]
        names = [key.decode() for key in ordered]
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in names:
                pipe.hget(self._keys.index(key), "size")
            sizes = await pipe.execute()
        return compiles.ScriptArtifacts(
            [
                compiles.ScriptArtifact(key, int(size))
                for key, size in zip(names, sizes, strict=True)
                if size is not None
                and size.isdigit()  # a damaged entry is compiled again when it is asked for
            ],
            [digest.decode() for digest in varied],
        )


def seconds_saved(text: bytes) -> float:
    """0 for what is damaged and cannot be added (prelude.lua's seconds_saved)."""
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0
