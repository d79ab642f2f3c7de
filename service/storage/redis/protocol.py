"""Whether this process may use what other releases have stored in Redis, and they what it stores."""

from __future__ import annotations

from ....compiler.api.protocols import REDIS
from ....compiler.errors import ProtocolMismatch
from .keys import PROTOCOL_RAISED, Keys
from .scripts import Scripts


async def join(keys: Keys, scripts: Scripts) -> None:
    """States in Redis what this release speaks. Raises ProtocolMismatch, RedisError."""
    number, oldest = await scripts.join(
        keys=[keys.identity], args=[REDIS.number, REDIS.oldest, keys.wake, PROTOCOL_RAISED]
    )
    if REDIS.number < oldest:
        raise ProtocolMismatch(
            f"a newer release uses this Redis: it works with protocol {oldest} to {number}, and this process speaks "
            f"{REDIS.number}",
            hint="Upgrade this process",
        )
    if number < REDIS.oldest:
        raise ProtocolMismatch(
            f"an older release has used this Redis: it speaks protocol {number}, and this process {REDIS.oldest} to "
            f"{REDIS.number}",
            hint="Start a release between the two first",
        )
