"""Ray resources and the Ray namespace by which nodes offer slots and actors take them."""

from __future__ import annotations

from typing import Any

OFFER = "torchrelay_worker"
"""Ray resource of a node on which slots may be placed."""
CPU_SLOTS = "torchrelay_cpu"
GPU_SLOTS = "torchrelay_gpu"
"""How many slots of each kind a node offers; without GPU_SLOTS, one for each GPU."""
ACTOR_SHARE = 0.0001
"""The part of OFFER that each of our actors takes, the least that Ray counts: it needs a node that offers slots, where
ten thousand find room. Ray does not limit how many run compiles: pools with other toolchains may share a node."""
NAMESPACE = "torchrelay"


def node_resources(cpu_slots: int, gpu_slots: int = 0) -> dict[str, float]:
    """The Ray resources of a node that offers slots; Ray counts cores and GPUs itself."""
    slots = {CPU_SLOTS: float(cpu_slots), GPU_SLOTS: float(gpu_slots)}
    return {OFFER: 1.0} | {name: count for name, count in slots.items() if count}


def live_nodes() -> list[dict[str, Any]]:
    """What Ray tells of each live node. Raises what ray.nodes raises."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]
