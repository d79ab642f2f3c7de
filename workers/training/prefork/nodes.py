"""Starts a process with PyTorch imported on each node that is likely to get a job's ranks."""

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
from ...scheduling.ray_resources import ACTOR_SHARE, OFFER, live_nodes
from ..ranks.environment import job_environment
from ..room import ranks_on
from . import server

log = logging.getLogger(__name__)

_SPARE = 2
"""Nodes beyond those that the ranks need: Ray may choose others than those with the most room."""


class PreforkActor:
    """On one node, for one job: the actor that owns its warm process. Ranks outlive both: their workers own them."""

    def __init__(self, train_order: bytes, folder: str) -> None:
        """train_order: a TrainOrder, encoded; folder: the job's."""
        given = decoding.from_msgpack(train_order, type=TrainOrder)
        self._owned = server.start(job_environment(given, Path(folder), os.environ))

    def path(self) -> str:
        """The path of the socket that takes launches."""
        return self._owned.path


class PreforkNodes:
    """The warm processes of one job. They end with the job, and with the process of this object."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._paths: dict[str, Any] = {}

    def start(self, train_order: TrainOrder, folder: str) -> None:
        """Start one on each node that is likely to get ranks, unless the job is no training or has requirements: what
        cannot be installed would be tried twice. A failure here costs seconds at the start and fails no job."""
        if train_order.spec.kind != "train" or train_order.spec.requirements:
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        encoded = msgspec.msgpack.encode(msgspec.structs.replace(train_order, package=b""))
        try:
            everything = {node["NodeID"]: node["Resources"] for node in live_nodes()}
            for node in likely_nodes(train_order.spec, free_resources()) or likely_nodes(
                train_order.spec, everything
            ):  # or those that have room once others leave
                options: dict[str, Any] = {
                    "num_cpus": 0,
                    "num_gpus": 0,
                    "max_restarts": 0,
                    "resources": {OFFER: ACTOR_SHARE},
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
                }
                self._actors[node] = ray.remote(PreforkActor).options(**options).remote(encoded, folder)
                self._paths[node] = self._actors[node].path.remote()
        except Exception as error:  # also of what is private in Ray
            log.warning("ranks start cold: %s", error)

    def on(self, node: str) -> str:
        """The socket of the warm process on `node`; '' if there is none (yet)."""
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
        """End the warm processes; ranks go on."""
        import ray

        actors, self._actors, self._paths = self._actors, {}, {}
        for actor in actors.values():
            try:
                ray.kill(actor)
            except (ray.exceptions.RayError, RuntimeError) as error:
                log.warning("a warm process was not ended: %s", error)


def likely_nodes(spec: TrainSpec, free: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The nodes that may get ranks, those with the most room first. free: the free resources of each (Ray's names)."""
    room = {name: ranks_on(node, spec) for name, node in free.items() if OFFER in node}
    names = sorted((name for name in room if room[name]), key=lambda name: (-room[name], name))
    held = needed = 0
    while needed < len(names) and held < spec.workers:
        held += room[names[needed]]
        needed += 1
    return names[: needed + _SPARE]
