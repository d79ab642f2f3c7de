"""Which slots of a Ray cluster a pool may use, where others have pools on the same cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ...compiler.errors import Unavailable
from .ray_cluster import RayNode
from .slots import Slot, SlotPlace

log = logging.getLogger(__name__)


class Claims(Protocol):
    """Shares slots among all who claim some of the same group. Who has not claimed for a while is dead."""

    async def claim(self, group: str, offered: Sequence[str], in_use: Sequence[str]) -> Collection[str]:
        """Those of `offered`, the group's slots, that the caller may use: its share; none, if there are too few.

        in_use: those that it uses, the ones that it wants to keep most first. They remain its own until a call does not
        list them: nobody else gets a slot before its job has ended. Raises Unavailable.
        """

    async def release(self) -> None:
        """Leave what was claimed to others. If that fails, it happens some time after the last call of `claim`."""


class OwnSlots:
    """What one pool claims of one cluster."""

    def __init__(self, claims: Claims, cluster: str) -> None:
        """cluster: its id, the same for all who share it."""
        self._claims = claims
        self._cluster = cluster
        self._answered = True

    async def choose(
        self,
        offered: Mapping[SlotPlace, RayNode],
        slots: Mapping[SlotPlace, Slot],
        leaving: Mapping[SlotPlace, Slot],
    ) -> set[SlotPlace] | None:
        """Those of `offered` on which the pool may have slots; None while nobody can tell. leaving: slots that it gives
        up, and that are not gone yet.

        Slots are shared within each group: of one kind and Python, and of one model of GPU, so that each pool gets some
        of each. The slots of one GPU go together: who measures on it must know what else runs there.
        """
        groups: dict[str, dict[str, list[SlotPlace]]] = {}
        for position, node in offered.items():
            devices = groups.setdefault(self._group(position, node), {})
            devices.setdefault(_device(position, node), []).append(position)
        held = [slot for slot in sorted(slots.values(), key=_wanted) if slot.position in offered]
        held += [slot for slot in leaving.values() if slot.position in offered]
        of: dict[str, list[str]] = {group: [] for group in groups}
        for slot in held:
            names = of[self._group(slot.position, slot.node)]
            if (name := _device(slot.position, slot.node)) not in names:
                names.append(name)
        try:
            answers = await asyncio.gather(
                *(self._claims.claim(group, list(devices), of[group]) for group, devices in groups.items())
            )
        except Unavailable as error:
            if self._answered:
                log.error("the cluster's slots stay as they are: %s", error)
            self._answered = False
            return None
        self._answered = True
        return {
            position
            for devices, own in zip(groups.values(), answers, strict=True)
            for device in own
            for position in devices.get(device, ())
        }

    async def release(self) -> None:
        await self._claims.release()

    def _group(self, position: SlotPlace, node: RayNode) -> str:
        # Ray names a GPU's model by a resource
        models = sorted(name for name in node.resources if name.startswith("accelerator_type:"))
        model = ",".join(models) if position.kind == "cuda" else ""
        return "|".join([self._cluster, position.kind, model, position.python or ""])


def _device(position: SlotPlace, node: RayNode) -> str:
    number = position.number % node.gpus if position.kind == "cuda" else position.number
    return f"{position.node}-{position.kind}{number}"


def _wanted(slot: Slot) -> int:
    """The rank of a slot among those that the pool wants to keep."""
    return 0 if slot.state == "busy" else 1 if slot.searching else 3 if slot.state == "resting" else 2
