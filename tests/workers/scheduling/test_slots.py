"""The slots of a pool: who takes one gets it at once, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.request import schema
from torchrelay.workers.messages import ForkServerReady
from torchrelay.workers.scheduling.slots import Slot, SlotPlace, Slots, WorkersBusy

TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
CPU = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
GPU = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])


def warm(slots: Slots, index: int) -> Slot:
    node: Any = SimpleNamespace(id="node", host="host")
    slot = Slot(node, SlotPlace("node", "cpu", index))
    slot.ready = ForkServerReady(pid=1, toolchain=TOOLCHAIN, target=CPU, jobs_dir="")
    slot.state = "idle"
    slots.all[slot.position] = slot
    return slot


def test_each_taker_gets_an_idle_slot_and_none_waits_for_one() -> None:
    slots = Slots()
    both = [warm(slots, index) for index in range(2)]
    assert [slots.take(TOOLCHAIN, CPU) for _ in both] == both
    assert slots.room(TOOLCHAIN, CPU) == 0
    with pytest.raises(WorkersBusy, match="no worker for CPU, cp311 torch"):
        slots.take(TOOLCHAIN, CPU)


def test_a_slot_that_is_given_back_is_told_of_and_can_be_taken() -> None:
    slots, told = Slots(), []
    slot = warm(slots, 0)
    slots.on_change = lambda: told.append(slots.room(TOOLCHAIN, CPU))
    slots.give_back(slots.take(TOOLCHAIN, CPU))
    assert told == [1]
    assert slots.take(TOOLCHAIN, CPU) is slot


def test_a_slot_that_has_died_meanwhile_is_not_idle_again() -> None:
    slots = Slots()
    warm(slots, 0)
    slot = slots.take(TOOLCHAIN, CPU)
    slot.state = "starting"
    slots.give_back(slot)
    with pytest.raises(WorkersBusy):
        slots.take(TOOLCHAIN, CPU)


def test_who_asks_for_what_will_not_come_is_turned_away() -> None:
    slots = Slots()
    warm(slots, 0)
    with pytest.raises(NoWorker, match="no worker for NVIDIA H200"):
        slots.take(TOOLCHAIN, GPU)
