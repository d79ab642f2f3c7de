"""The pool's queue: namespaces take turns at the slots, each in its own order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from torchrelay.compiler.errors import NoWorker
from torchrelay.compiler.request import schema
from torchrelay.workers.messages import ForkServerReady
from torchrelay.workers.scheduling.slot_queue import Slot, SlotPlace, SlotQueue

TOOLCHAIN = schema.Toolchain(python="cp311", torch="0.0.0", triton="", cuda="", platform="linux-x86_64")
CPU = schema.Target(kind="cpu", name="", capability="", units=0, cpu=[])
GPU = schema.Target(kind="cuda", name="NVIDIA H200", capability="9.0", units=132, cpu=[])


def warm(slots: SlotQueue, index: int) -> Slot:
    slot = Slot(SimpleNamespace(id="node", host="host"), SlotPlace("node", "cpu", index))
    slot.ready = ForkServerReady(pid=1, toolchain=TOOLCHAIN, target=CPU, jobs_dir="")
    slot.state = "idle"
    slots.all[slot.place] = slot
    return slot


async def serve_all(asked: list[str], count: int = 1) -> list[str]:
    """The order in which jobs named `namespace number` get one of `count` slots that are all busy at first."""
    slots, order = SlotQueue(), []
    for index in range(count):
        warm(slots, index)
    first = [await slots.take("nobody", TOOLCHAIN, CPU, lambda n: None) for _ in range(count)]

    async def job(name: str) -> None:
        slot = await slots.take(name.partition(" ")[0], TOOLCHAIN, CPU, lambda n: None)
        order.append(name)
        await asyncio.sleep(0)
        slots.give_back(slot)

    jobs = []
    for name in asked:
        jobs.append(asyncio.create_task(job(name)))
        await asyncio.sleep(0)
    for slot in first:
        slots.give_back(slot)
    await asyncio.gather(*jobs)
    assert slots.waiting() == 0
    return order


def test_one_namespace_is_served_in_its_order() -> None:
    asked = [f"red {n}" for n in range(5)]
    assert asyncio.run(serve_all(asked)) == asked


def test_namespaces_take_turns_however_many_jobs_one_has_queued() -> None:
    asked = [f"red {n}" for n in range(5)] + ["blue 0", "blue 1", "green 0"]
    order = asyncio.run(serve_all(asked))
    assert order[:3] == ["red 0", "blue 0", "green 0"]
    assert order == ["red 0", "blue 0", "green 0", "red 1", "blue 1", "red 2", "red 3", "red 4"]


def test_turns_are_taken_over_several_slots() -> None:
    asked = [f"red {n}" for n in range(6)] + ["blue 0", "blue 1"]
    order = asyncio.run(serve_all(asked, count=2))
    assert order.index("blue 1") < order.index("red 3")


def test_a_job_hears_how_many_are_served_before_it() -> None:
    async def ask() -> list[int]:
        slots, heard = SlotQueue(), []
        warm(slots, 0)
        await slots.take("red", TOOLCHAIN, CPU, heard.append)
        for namespace in ("red", "red", "red", "blue", "blue"):
            asyncio.get_running_loop().create_task(slots.take(namespace, TOOLCHAIN, CPU, heard.append))
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return heard

    assert asyncio.run(ask()) == [0, 1, 2, 1, 3]


def test_a_cancelled_turn_goes_to_the_next() -> None:
    async def scenario() -> None:
        slots = SlotQueue()
        slot = warm(slots, 0)
        await slots.take("red", TOOLCHAIN, CPU, lambda n: None)
        waiting = [
            asyncio.create_task(slots.take(n, TOOLCHAIN, CPU, lambda n: None)) for n in ("red", "blue")
        ]
        await asyncio.sleep(0)
        slots.give_back(slot)
        waiting[0].cancel()  # given and cancelled in the same turn of the loop
        assert await waiting[1] is slot

    asyncio.run(scenario())


def test_who_waits_for_what_will_not_come_is_turned_away() -> None:
    async def scenario() -> None:
        slots = SlotQueue()
        warm(slots, 0)
        with pytest.raises(NoWorker, match="no worker for NVIDIA H200"):
            await slots.take("red", TOOLCHAIN, GPU, lambda n: None)
        assert slots.waiting() == 0

    asyncio.run(scenario())
