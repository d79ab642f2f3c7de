"""Stage 5: queues compiles for the dispatchers: clients' in gateways, and jobs' in the dispatchers that run these.

A process remembers what it has queued, so that it can queue it once more if Redis loses it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec
import structlog

from ...compiler.errors import RelayError
from ..admission.compile_request import CompileRequest
from .single_flight import CompileNeeds, Leases, Priority

log = structlog.get_logger(__name__)

_REMEMBERED_BYTES = 64 << 20
_REMEMBERED = 4096
"""A process remembers its latest requests: so many bytes of bodies together, and so many requests."""


class QueuedRequest(NamedTuple):
    body: bytes
    needs: CompileNeeds


class QueuedRequests:
    """What a process has queued lately, of all namespaces."""

    def __init__(self) -> None:
        self._queued: OrderedDict[tuple[str, str], QueuedRequest] = OrderedDict()
        self._bytes = 0

    def get(self, namespace: str, key: str) -> QueuedRequest | None:
        return self._queued.get((namespace, key))

    def put(self, namespace: str, key: str, queued: QueuedRequest) -> None:
        before = self._queued.pop((namespace, key), None)
        self._bytes += len(queued.body) - (len(before.body) if before else 0)
        self._queued[namespace, key] = queued
        while self._bytes > _REMEMBERED_BYTES or len(self._queued) > _REMEMBERED:
            _, oldest = self._queued.popitem(last=False)
            self._bytes -= len(oldest.body)


class CompileQueue:
    def __init__(self, namespace: str, leases: Leases, queued: QueuedRequests) -> None:
        self._namespace = namespace
        self._leases = leases
        self._queued = queued
        self._first: dict[str, asyncio.Event] = {}
        """Set when the first of those who ask for a key at one time has its answer."""

    async def ask(
        self,
        request: CompileRequest,
        body: bytes,
        *,
        priority: Priority = Priority.PERSON,
        dispatcher: str = "",
    ) -> Literal["hit", "wait", "queued"]:
        """Makes sure that this is compiled. "hit": it was published a moment ago. "wait": it was queued before.
        priority, dispatcher: see CompileNeeds.

        Raises Overloaded, OverQuota, the remembered error of a compile that just failed, RedisError.
        """
        needs = self._leases.needs(request)
        needs = msgspec.structs.replace(needs, priority=priority, dispatcher=dispatcher)
        key = request.key
        if (first := self._first.get(key)) is not None:
            await first.wait()  # of a thousand that ask together, one sends the body
            answer = await self._leases.queue(key, body, needs)
        else:
            first = self._first[key] = asyncio.Event()
            try:
                answer = await self._leases.queue(key, body, needs)
            finally:
                del self._first[key]
                first.set()
        if answer != "hit":
            self._queued.put(self._namespace, key, QueuedRequest(body, needs))
        return answer

    async def ask_again(self, key: str) -> bool:
        """Queues again what was asked for here and Redis has lost; false if it is not known any more, or is refused.
        Raises RedisError."""
        queued = self._queued.get(self._namespace, key)
        if queued is None:
            return False
        try:
            answer = await self._leases.queue(key, queued.body, queued.needs)
        except RelayError as error:
            log.warning("lost_compile_refused", key=key, error=error.message)
            return False
        log.warning("lost_compile_queued_again", key=key, answer=answer)
        return True
