"""All of Ray's private parts that we touch, for Ray 2.60: placement groups, free resources, Ray Train's controller.

In: plain values. Out: plain values, and classes of Ray Train's to inherit from. Ray is imported when a function is
called, since it reads its environment as it is imported; imports nothing of this project.
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


def free_resources() -> dict[str, dict[str, float]]:
    """What each node has left; no public function of Ray's tells it."""
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())


# --- placement groups that a dead Ray Train controller left ---------------------------------------------
# Ray removes a group when both its creator and the creator's Ray job have gone, and the job here is the gateway's. Ray
# Train's own cleaner asks Ray's dashboard, of which there is none. Ray's table tells a group's creator, its public
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
    """The base class of who is told what Ray Train's controller does."""
    from ray.train.v2._internal.execution.callback import ControllerCallback

    return ControllerCallback


def trainer_without_cleaner() -> type[Any]:
    """DataParallelTrainer without the detached cleaner, which asks a dashboard that is not there: Ray removes a
    placement group as its controller dies."""
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class RankTrainer(DataParallelTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    return RankTrainer


def start_autoscaling_coordinator(resources: Mapping[str, float]) -> None:
    """Have the actor that tells all elastic jobs what is free, if there is none yet, on any node with `resources`.

    The first job's controller would make it, bound to its own node for ever: once that is lost, no elastic job starts
    again. Who makes it first says where it may live.
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
    """Forget what a controller that was killed wanted; else elastic jobs count with it for three minutes more. run: the
    id of its run."""
    import ray

    try:
        coordinator = ray.get_actor(_COORDINATOR, namespace=_COORDINATOR)
        ray.get(coordinator.cancel_request.remote(f"train-{run}"), timeout=_CANCEL_SECONDS)
    except (ray.exceptions.RayError, ValueError) as error:
        log.warning("what a lost controller wanted is kept free for a while: %s", error)
