"""Shares the slots of a Ray cluster among the dispatchers of an installation, in Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence

import structlog
from redis.exceptions import RedisError

from ...compiler.errors import Unavailable
from ..base.settings import ServiceSettings
from ..storage.redis.fair_pool import reserved_for_leases
from ..storage.redis.keys import Keys
from ..storage.redis.scripts import Scripts

log = structlog.get_logger(__name__)

_LEAST_SECONDS = 10.0
"""A pool renews its claims every 2 s, or later while Ray is slow."""
_RELEASE_SECONDS = 2.0


class SlotClaims:
    """The claims of one dispatcher (workers/scheduling/own_slots.py). One that has died loses its slots to the others
    after `lease_seconds`, or 10 s if that is longer."""

    def __init__(self, keys: Keys, scripts: Scripts, settings: ServiceSettings) -> None:
        self._keys = keys
        self._scripts = scripts
        self._lease_ms = int(max(settings.lease_seconds, _LEAST_SECONDS) * 1000)
        self.dispatcher = uuid.uuid4().hex
        self._groups: set[str] = set()

    async def claim(self, group: str, offered: Sequence[str], in_use: Sequence[str]) -> Collection[str]:
        """Those of `offered` that this dispatcher may use. in_use: those that it uses, what it wants to keep most
        first. Raises Unavailable."""
        self._groups.add(group)
        try:
            with reserved_for_leases():
                answer: list[bytes] = await self._scripts.claim_slots(
                    keys=self._keys.slot_keys(group),
                    args=[self.dispatcher, self._lease_ms, len(offered), *offered, *in_use],
                )
        except RedisError as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        return [slot.decode() for slot in answer]

    async def release(self) -> None:
        """Leave all slots to the other dispatchers at once, if Redis answers."""
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                for group in self._groups:
                    await self._scripts.claim_slots(
                        keys=self._keys.slot_keys(group), args=[self.dispatcher, 0, 0]
                    )
        except (RedisError, TimeoutError) as error:
            log.warning("slots_not_released", error=f"{type(error).__name__}: {error}")
