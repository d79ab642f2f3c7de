"""Ray resources and the Ray namespace by which nodes offer slots and actors take them."""

from __future__ import annotations

OFFER = "torchrelay_worker"
"""Ray resource of a node on which slots may be placed."""


CPU_SLOTS = "torchrelay_cpu"


DRIVER_SHARE = 0.0001
"""Of OFFER, for an actor that may be on any node that offers slots."""


NAMESPACE = "torchrelay"


def node_resources(cpu_slots: int) -> dict[str, float]:
    """What a node says to Ray to be given slots: its CPU slots here; its cores and GPUs in Ray's own way."""
    return {OFFER: 1.0} | ({CPU_SLOTS: float(cpu_slots)} if cpu_slots else {})
