"""Lets Ray's autoscaler follow the compiles. Those that wait ask it for nodes; nodes that had no work for a while give
their actors back, so that it can remove them.

Ray derives demand from actors that find no node, but slots get actors only on nodes that are there; and a node with an
actor is never idle. What is asked for is the size of the whole cluster, and the last who asks decides: all dispatchers
of a cluster see the same queue, so they ask for about the same. Version 2 of the autoscaler does nothing for a request
that it cannot fulfil as a whole: hence the settings' limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from ...compiler.errors import Unavailable
from ..settings import PoolSettings
from .ray_cluster import RayCluster, RayNode
from .ray_resources import ACTOR_SHARE, CPU_SLOTS, OFFER
from .slots import Slot, Slots

log = logging.getLogger(__name__)


class Autoscaling:
    """Rests slots of one pool. A resting slot has no actor; it stays the pool's, and wakes when compiles wait."""

    def __init__(
        self,
        settings: PoolSettings,
        cluster: RayCluster,
        slots: Slots,
        wake: Callable[[Slot], None],
        retire: Callable[[Slot], Awaitable[None]],
    ) -> None:
        """wake, retire: start and stop a slot's actor."""
        self._settings = settings
        self._cluster = cluster
        self._slots = slots
        self._wake = wake
        self._retire = retire
        self._worked: dict[str, float] = {}
        """When each node last had work, by the event loop's clock."""
        self._asks = settings.autoscale_idle_seconds > 0  # a process before this one may have left a request

    async def adjust(self, nodes: Sequence[RayNode], overdue: Mapping[str, int]) -> None:
        """overdue: compiles that wait for a slot, by the kind of device. Raises Unavailable."""
        if not self._settings.autoscale_idle_seconds:
            return
        waiting = Counter(overdue)
        searches, self._slots.searches_wanted = self._slots.searches_wanted, False
        resting = [slot for slot in self._slots.all.values() if slot.state == "resting"]
        for slot in resting:
            if waiting[slot.kind] or searches:
                self._wake(slot)
        bundles = self._bundles(nodes, waiting - Counter(slot.kind for slot in resting))
        if bundles or self._asks:
            await self._cluster.request(bundles)
            self._asks = bool(bundles)
        if not waiting and not searches:
            await self._let_rest()

    async def end(self) -> None:
        """Take back what was asked for."""
        if self._asks:
            with contextlib.suppress(Unavailable):
                await self._cluster.request([])

    def _bundles(self, nodes: Sequence[RayNode], more: Mapping[str, int]) -> list[dict[str, float]]:
        """What must find room so that so many more compiles can run; empty if none waits."""
        settings, bundles = self._settings, list[dict[str, float]]()
        if more.get("cpu"):
            slots = sum(node.cpu_slots for node in nodes) + more["cpu"]
            bundles += [{CPU_SLOTS: 1.0}] * min(slots, settings.autoscale_cpu_slots)
        if more.get("cuda") and settings.gpu_slots_per_gpu:
            gpus = sum(node.gpus for node in nodes) + math.ceil(more["cuda"] / settings.gpu_slots_per_gpu)
            bundles += [{"GPU": 1.0, OFFER: ACTOR_SHARE}] * min(gpus, settings.autoscale_gpus)
        return bundles

    async def _let_rest(self) -> None:
        tired = self._tired(self._slots.all.values())
        for slot in tired:
            slot.state = "resting"
        await asyncio.gather(*map(self._rest, tired))

    def _tired(self, slots: Collection[Slot]) -> list[Slot]:
        """Those of nodes that had no work for a while. One node with each kind of slot stays awake, the oldest."""
        now = asyncio.get_running_loop().time()
        on: dict[str, list[Slot]] = {}
        for slot in slots:
            on.setdefault(slot.position.node, []).append(slot)
        self._worked = {node: self._worked.get(node, now) for node in on}
        kept: set[tuple[str, str | None]] = set()
        tired = []
        for node, of_node in on.items():
            awake = [slot for slot in of_node if slot.state != "resting"]
            if any(slot.state != "idle" or slot.searching for slot in awake):
                self._worked[node] = now
            kinds = {(slot.kind, slot.position.python) for slot in awake}
            if kinds <= kept and now - self._worked[node] >= self._settings.autoscale_idle_seconds:
                tired += awake
            kept |= kinds
        return tired

    async def _rest(self, slot: Slot) -> None:
        await self._retire(slot)
        slot.actor = slot.supervisor = None
        slot.state = "resting"  # its supervisor's end has changed it
        log.info("worker %s rests", slot.worker)
