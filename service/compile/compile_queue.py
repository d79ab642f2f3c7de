"""Stage 5: queues compiles for the dispatchers.

A gateway remembers what it has queued, so that it can queue it once more if Redis loses it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

import structlog

from ...compiler.errors import RelayError
from ..admission.compile_request import CompileRequest
from .single_flight import CompileNeeds, Leases

log = structlog.get_logger(__name__)

_REMEMBERED_BYTES = 64 << 20
"""Bodies that a gateway remembers, together; the latest."""


class _Queued(NamedTuple):
    body: bytes
    needs: CompileNeeds
    finish: bool


class QueuedRequests:
    """What a gateway has queued lately, of all namespaces."""

    def __init__(self) -> None:
        self._queued: OrderedDict[tuple[str, str], _Queued] = OrderedDict()
        self._bytes = 0

    def get(self, namespace: str, key: str) -> _Queued | None:
        return self._queued.get((namespace, key))

    def put(self, namespace: str, key: str, queued: _Queued) -> None:
        before = self._queued.pop((namespace, key), None)
        self._bytes += len(queued.body) - (len(before.body) if before else 0)
        self._queued[namespace, key] = queued
        while self._bytes > _REMEMBERED_BYTES:
            _, oldest = self._queued.popitem(last=False)
            self._bytes -= len(oldest.body)


class CompileQueue:
    """The queue of one namespace."""

    def __init__(self, namespace: str, leases: Leases, queued: QueuedRequests) -> None:
        self._namespace = namespace
        self._leases = leases
        self._queued = queued

    async def ask(
        self, request: CompileRequest, body: bytes, *, finish: bool
    ) -> Literal["hit", "wait", "queued"]:
        """Makes sure that this is compiled. "hit": it was published a moment ago. "wait": it was queued before.

        Raises Overloaded, OverQuota, the remembered error of a compile that just failed, RedisError.
        """
        needs = CompileNeeds(request.toolchain, request.target)
        answer = await self._leases.queue(request.key, body, needs, finish=finish)
        if answer != "hit":
            self._queued.put(self._namespace, request.key, _Queued(body, needs, finish))
        return answer

    async def ask_again(self, key: str) -> bool:
        """Queues again what was asked for here and Redis has lost; false if it is not known any more, or is refused.
        Raises RedisError."""
        queued = self._queued.get(self._namespace, key)
        if queued is None:
            return False
        try:
            answer = await self._leases.queue(key, queued.body, queued.needs, finish=queued.finish)
        except RelayError as error:
            log.warning("lost_compile_refused", key=key, error=error.message)
            return False
        log.warning("lost_compile_queued_again", key=key, answer=answer)
        return True
