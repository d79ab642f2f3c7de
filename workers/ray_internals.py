"""All of Ray's private parts that we touch, for Ray 2.60: a cluster's id, free resources, placement groups, Ray Train.

Functions take and return plain values, or classes of Ray Train to inherit from. Ray is imported when a function is
called, because it reads its environment at import. Imports nothing of this project.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

_COORDINATOR = "AutoscalingCoordinator"
_CANCEL_SECONDS = 3.0


def actor_id(handle: Any) -> str:
    """Of an actor, in hexadecimal."""
    return str(handle._actor_id.hex())


def cluster_id() -> str:
    """Of the cluster that this process has joined, in hexadecimal: the same for all its processes."""
    from ray._private.worker import global_worker

    return str(global_worker.node.cluster_id.hex())


def free_resources() -> dict[str, dict[str, float]]:
    """The free resources of each node; Ray has no public function for it."""
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())


# --- placement groups that a dead Ray Train controller left ---------------------------------------------
# Ray removes a group when both its creator and the creator's Ray job have gone, and the job here is the gateway's. Ray
# Train's own cleaner asks Ray's dashboard, of which there is none. Ray's table names a group's creator, its public
# functions do not.


def remove_placement_groups_of(actor_id: str) -> int:
    """Remove the groups that the actor made; how many there were. `actor_id`: in hexadecimal."""
    return _remove_placement_groups(lambda group: group.creator_actor_id.hex() == actor_id)


def remove_placement_groups_of_the_dead(namespace: str) -> int:
    """Remove the groups whose creators, actors of this Ray namespace, have died; how many there were."""
    return _remove_placement_groups(
        lambda group: group.creator_actor_dead and not group.is_detached and group.ray_namespace == namespace
    )


def _remove_placement_groups(which: Callable[[Any], bool]) -> int:
    from ray import PlacementGroupID
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    removed = 0
    for data in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(data)
        if group.state != PlacementGroupTableData.REMOVED and which(group):
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))
            removed += 1
    return removed


# --- Ray Train ------------------------------------------------------------------------------------------


def controller_callback() -> type[Any]:
    """The base class of callbacks of Ray Train's controller."""
    from ray.train.v2._internal.execution.callback import ControllerCallback

    return ControllerCallback


def trainer_without_cleaner() -> type[Any]:
    """DataParallelTrainer without its detached cleaner, which asks a dashboard that does not run here: Ray removes a
    placement group when its controller dies."""
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class RankTrainer(DataParallelTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    return RankTrainer


def start_autoscaling_coordinator(resources: Mapping[str, float]) -> None:
    """Make the actor that reports free resources to elastic jobs, on any node with `resources`, if there is none yet.

    Otherwise the first job's controller makes it, bound to its own node: once that node is lost, no elastic job starts
    again. The first to make it decides where it may run.
    """
    import ray
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator

    make = ray.remote(coordinator._AutoscalingCoordinatorActor).options(
        name=_COORDINATOR,
        namespace=_COORDINATOR,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        resources=dict(resources),
    )
    try:
        make.remote()
    except ray.exceptions.RayError as error:
        log.warning("Ray Train's coordinator was not made: %s", error)


def cancel_resource_request(run: str) -> None:
    """Cancel the resource request of a controller that was killed; else elastic jobs count it for three minutes more.
    run: the id of its run."""
    import ray

    try:
        coordinator = ray.get_actor(_COORDINATOR, namespace=_COORDINATOR)
        ray.get(coordinator.cancel_request.remote(f"train-{run}"), timeout=_CANCEL_SECONDS)
    except (ray.exceptions.RayError, ValueError) as error:
        log.warning("the resources that a lost controller requested stay reserved for a while: %s", error)
