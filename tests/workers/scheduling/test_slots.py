"""The slots of a pool: who takes one gets it at once, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.request import schema
from torchrelay.workers.messages import ForkServerReady
from torchrelay.workers.scheduling.ray_cluster import RayNode
from torchrelay.workers.scheduling.slots import (
    Slot,
    SlotPlace,
    Slots,
    WorkersBusy,
    offered_slots,
    slot_settings,
)
from torchrelay.workers.settings import PoolSettings

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


def gpu_slots(nodes: list[RayNode], settings: PoolSettings) -> Slots:
    """All slots that the nodes offer, warm."""
    slots = Slots()
    for position, node in offered_slots(nodes, settings).items():
        slot = slots.all[position] = Slot(node, position)
        gpu = str(slot_settings(slot, settings).gpu)
        slot.ready = ForkServerReady(pid=1, toolchain=TOOLCHAIN, target=GPU, jobs_dir="", device=gpu)
        slot.state = "idle"
    return slots


def on_gpus(offered: Any, node: RayNode) -> list[int]:
    return [position.number % node.gpus for position in offered]


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


def test_a_node_has_as_many_gpu_slots_as_it_offers_and_each_gpu_at_least_one() -> None:
    def offered(gpus: int, slots: int, most: int = 8) -> list[int]:
        node = RayNode("n", "host", cpu_slots=0, gpus=gpus, gpu_slots=slots)
        return on_gpus(offered_slots([node], PoolSettings(gpu_slots_per_gpu=most)), node)

    assert offered(gpus=1, slots=5) == [0] * 5
    assert offered(gpus=2, slots=5) == [0, 1, 0, 1, 0]
    assert offered(gpus=2, slots=50, most=3) == [0, 1, 0, 1, 0, 1]
    assert offered(gpus=4, slots=2) == [0, 1, 2, 3]
    assert offered(gpus=2, slots=0) == [0, 1]  # a node of an earlier release
    assert offered(gpus=2, slots=5, most=0) == []
    assert offered(gpus=0, slots=5) == []


def test_compiles_go_to_the_gpu_and_the_node_that_compile_the_least() -> None:
    nodes = [RayNode(name, "host", cpu_slots=0, gpus=2, gpu_slots=6) for name in "ab"]
    slots = gpu_slots(nodes, PoolSettings())
    taken = [slots.take(TOOLCHAIN, GPU).device() for _ in range(12)]
    assert [node for node, _ in taken] == ["a", "b"] * 6
    for begin in range(0, 12, 4):
        assert sorted(taken[begin : begin + 4]) == [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]
    assert slots.room(TOOLCHAIN, GPU) == 0


def test_one_slot_of_a_gpu_searches_and_is_warm_for_it_even_while_it_compiles() -> None:
    nodes = [RayNode("n", "host", cpu_slots=0, gpus=2, gpu_slots=6)]
    settings = PoolSettings()
    slots = gpu_slots(nodes, settings)
    warm_ones = [s.worker for s in slots.all.values() if slot_settings(s, settings).warm_searches]
    assert warm_ones == ["n-cuda0", "n-cuda1"]
    for slot in list(slots.all.values())[:3]:
        slot.state = "busy"
    assert [device.worker for device in slots.search_devices(TOOLCHAIN, GPU)] == warm_ones
    slots.all[SlotPlace("n", "cuda", 0)].state = "dead"
    assert {device.worker for device in slots.search_devices(TOOLCHAIN, GPU)} == {"n-cuda1", "n-cuda4"}
