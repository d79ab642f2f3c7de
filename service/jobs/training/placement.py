"""Which training jobs this dispatcher takes: those that its Ray cluster has room for, or whose ranks it has.

A job that only this cluster could ever hold is taken at once, and waits for room in Ray. Otherwise it waits in Redis
until some cluster has room, and a smaller one may pass it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ....compiler.api.training.jobs import TrainSpec
from ....workers.pool import WorkerPool, after_placing, why_no_room
from ...compile.registry import DispatcherInfo, DispatcherRegistry
from .records import TrainingJobRecord


class TrainingPlacement:
    """Shared by all namespaces."""

    def __init__(
        self,
        dispatcher: str,
        pool: WorkerPool,
        registry: DispatcherRegistry,
        promised: Callable[[], list[TrainSpec]],
        *,
        gone_seconds: float,
    ) -> None:
        """dispatcher: its id. promised: the jobs that it has taken and that have no ranks yet. gone_seconds: a cluster
        without a dispatcher for so long is gone, and its jobs begin again elsewhere."""
        self._dispatcher = dispatcher
        self._pool = pool
        self._registry = registry
        self._promised = promised
        self._gone_seconds = gone_seconds
        self._missing: dict[str, float] = {}
        """Since when a cluster with jobs has had no dispatcher."""

    @property
    def cluster(self) -> str:
        return self._pool.cluster or self._dispatcher

    async def may_take(self, record: TrainingJobRecord) -> bool:
        """Raises RedisError, Unavailable."""
        others = [each for each in await self._registry.dispatchers() if each.id != self._dispatcher]
        if record.cancelled_by:
            return True
        if record.progress.begun == record.resumes:
            return self._may_go_on_here(record.progress.cluster, others)
        spec = record.job.spec
        if why_no_room(spec, self._pool.node_resources()):
            return False
        if not any(each.cluster != self.cluster and not why_no_room(spec, each.nodes) for each in others):
            return True
        promised = [each for other in others if other.cluster == self.cluster for each in other.promised]
        left = after_placing([*self._promised(), *promised], await self._pool.training.free_resources())
        return not why_no_room(spec, left)

    def _may_go_on_here(self, cluster: str, others: list[DispatcherInfo]) -> bool:
        """Whether ranks that were started on `cluster` are here, or nowhere any more."""
        if cluster in ("", self._pool.cluster):
            return True
        if any(each.cluster == cluster for each in others):
            self._missing.pop(cluster, None)
            return False
        since = self._missing.setdefault(cluster, time.monotonic())
        return time.monotonic() - since >= self._gone_seconds


def room_asked(spec: TrainSpec) -> TrainSpec:
    """What other dispatchers are to know of a job: the room that it needs."""
    return TrainSpec(
        name="-",
        device=spec.device,
        workers=spec.workers,
        min_workers=spec.min_workers,
        cpus=spec.cpus,
        memory_bytes=spec.memory_bytes,
    )
