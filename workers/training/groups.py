"""Placement groups that a dead Ray Train controller left: its actor's id in; the cores and GPUs that they held, free.

Ray removes a group when both its creator and the creator's Ray job have gone, and the job here is the gateway's. Ray
Train's own cleaner asks Ray's dashboard, of which there is none. Ray's table tells a group's creator, its public
functions do not; tried with Ray 2.60.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def remove_groups_of(actor_id: str) -> int:
    """Remove the groups that the actor made; how many there were. `actor_id`: in hexadecimal."""
    return _remove(lambda group: group.creator_actor_id.hex() == actor_id)


def remove_groups_of_the_dead(namespace: str) -> int:
    """Remove the groups whose creators, actors of this Ray namespace, have died; how many there were."""
    return _remove(
        lambda group: group.creator_actor_dead and not group.is_detached and group.ray_namespace == namespace
    )


def _remove(which: Callable[[Any], bool]) -> int:
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
