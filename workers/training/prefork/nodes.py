"""Where a job's ranks may come to be: an order in; on each such node an actor that has a warm process for them, out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ....compiler import decoding
from ....compiler.api.training.jobs import TrainSpec
from ....compiler.api.training.node_messages import TrainOrder
from ...ray_internals import free_resources
from ...scheduling.ray_resources import DRIVER_SHARE, OFFER
from ..ranks.environment import job_environment
from . import server

log = logging.getLogger(__name__)


_SPARE = 2
"""Nodes more than ranks need: Ray may choose others than those with the most room."""


class PreforkActor:
    """On one node, for one job: the actor that owns its warm process. Ranks outlive both: they are their workers'."""

    def __init__(self, order: bytes, folder: str) -> None:
        """order: a TrainOrder, encoded; folder: the job's."""
        given = decoding.from_msgpack(order, type=TrainOrder)
        self._owned = server.start(job_environment(given, Path(folder), os.environ))

    def path(self) -> str:
        """Of the socket that takes launches, from now on."""
        return self._owned.path


class PreforkNodes:
    """The warm processes of one job. They end with it, and with the process that has this."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._paths: dict[str, Any] = {}

    def start(self, order: TrainOrder, folder: str) -> None:
        """On the nodes that are likely to get ranks; none for other programs, nor for jobs with requirements:
        what cannot be installed would be tried twice. Whatever fails here costs seconds later, and no job."""
        if order.spec.kind != "train" or order.spec.requirements:
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        brief = msgspec.msgpack.encode(msgspec.structs.replace(order, package=b""))
        try:
            for node in likely_nodes(order.spec, free_resources()) or likely_nodes(
                order.spec, _all()
            ):  # or once others leave
                options: dict[str, Any] = {
                    "num_cpus": 0,
                    "num_gpus": 0,
                    "max_restarts": 0,
                    "resources": {OFFER: DRIVER_SHARE},
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
                }
                self._actors[node] = ray.remote(PreforkActor).options(**options).remote(brief, folder)
                self._paths[node] = self._actors[node].path.remote()
        except Exception as error:  # also of what is private in Ray
            log.warning("ranks start cold: %s", error)

    def on(self, node: str) -> str:
        """The socket of the warm process there; '' if there is none (yet)."""
        import ray

        path = self._paths.get(node)
        if path is None:
            return ""
        try:
            return str(ray.get(path, timeout=0))
        except ray.exceptions.RayError as error:  # also: not yet
            log.info("ranks on node %s start cold: %s", node, error)
            return ""

    def end(self) -> None:
        """Ranks that run go on."""
        import ray

        actors, self._actors, self._paths = self._actors, {}, {}
        for actor in actors.values():
            try:
                ray.kill(actor)
            except (ray.exceptions.RayError, RuntimeError) as error:
                log.warning("a warm process was not ended: %s", error)


def ranks_on(node: Mapping[str, float], spec: TrainSpec) -> int:
    """How many of the job's ranks fit into this much of a node, in Ray's words."""
    asked = {"CPU": spec.cpus, "memory": float(spec.memory_bytes), "GPU": float(spec.device == "cuda")}
    return min(int((node.get(name, 0.0) + 1e-6) // amount) for name, amount in asked.items() if amount > 0)


def likely_nodes(spec: TrainSpec, free: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Nodes that may get ranks, those with the most room first. free: what each has left, in Ray's words."""
    room = {name: ranks_on(node, spec) for name, node in free.items() if OFFER in node}
    names = sorted((name for name in room if room[name]), key=lambda name: (-room[name], name))
    held = needed = 0
    while needed < len(names) and held < spec.workers:
        held += room[names[needed]]
        needed += 1
    return names[: needed + _SPARE]


def _all() -> dict[str, dict[str, float]]:
    """Of each node, whoever holds it now."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
