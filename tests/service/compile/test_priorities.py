"""One queue: people's compiles go before jobs', and jobs leave room in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from service_parts import NEEDS, RedisServer
from torchrelay.compiler.errors import Overloaded
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.pending import PendingCompiles
from torchrelay.service.compile.single_flight import Lease, Leases, Priority
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts


class Queue:
    """The queue of the namespace `default`."""

    def __init__(self, url: str, **settings: Any) -> None:
        configured = ServiceSettings(redis_url=url, **settings)
        self.redis = connect(configured)
        self.keys = Keys(configured.redis_prefix)
        self.leases = Leases(self.keys, Scripts(self.redis), configured)
        self._pending = PendingCompiles(self.redis, self.keys, most=100)

    async def put(self, key: str, priority: Priority = Priority.PERSON) -> str:
        needs = msgspec.structs.replace(NEEDS, priority=priority)
        return await self.leases.queue(key * 64, b"body", needs)

    async def take(self, key: str) -> Lease | None:
        return await self.leases.take(key * 64, NEEDS)

    async def due(self) -> dict[str, Priority]:
        return {each.key[0]: each.priority for each in await self._pending.due()}

    async def unwanted(self) -> dict[str, float]:
        """For how many seconds."""
        return {each.key[0]: each.unwanted for each in await self._pending.due()}


Scenario = Callable[[Queue], Awaitable[None]]


@pytest.fixture
def run(redis_server: RedisServer) -> Callable[..., None]:
    def run(scenario: Scenario, **settings: Any) -> None:
        async def main() -> None:
            queue = Queue(redis_server.url, **settings)
            try:
                await scenario(queue)
            finally:
                await queue.redis.aclose()

        asyncio.run(main())

    return run


def test_what_a_job_has_queued_gets_the_priority_of_whoever_joins(run: Callable[..., None]) -> None:
    async def scenario(queue: Queue) -> None:
        assert [await queue.put(key, Priority.BATCH) for key in "abc"] == ["queued"] * 3
        assert await queue.put("b", Priority.DEVICES) == "wait"
        assert await queue.put("c") == "wait"
        assert await queue.due() == {"a": Priority.BATCH, "b": Priority.DEVICES, "c": Priority.PERSON}
        assert await queue.put("c", Priority.BATCH) == "wait"
        assert (await queue.due())["c"] is Priority.PERSON

    run(scenario)


def test_what_a_job_has_begun_goes_back_at_the_priority_of_whoever_joined(run: Callable[..., None]) -> None:
    async def scenario(queue: Queue) -> None:
        for key, joins in (("a", False), ("b", True)):
            await queue.put(key, Priority.BATCH)
            lease = await queue.take(key)
            assert lease is not None
            if joins:
                assert await queue.put(key) == "wait"
            await queue.leases.release(lease)
        assert await queue.due() == {"a": Priority.BATCH, "b": Priority.PERSON}

    run(scenario)


def test_jobs_fill_half_of_the_queue_at_most(run: Callable[..., None]) -> None:
    async def scenario(queue: Queue) -> None:
        assert [await queue.put(key, Priority.DEVICES) for key in "ab"] == ["queued"] * 2
        with pytest.raises(Overloaded):
            await queue.put("c", Priority.BATCH)
        assert [await queue.put(key) for key in "de"] == ["queued"] * 2
        with pytest.raises(Overloaded):
            await queue.put("f")

    run(scenario, max_queued=4)


def test_of_a_quota_jobs_use_what_they_compile_and_not_what_they_have_queued(
    run: Callable[..., None],
) -> None:
    async def scenario(queue: Queue) -> None:
        for key in "abc":
            await queue.put(key, Priority.BATCH)
        lease = await queue.take("a")
        assert lease is not None
        assert await queue.put("d") == "queued"
        assert await queue.take("b") is None  # two compiles are the quota
        await queue.leases.release(lease)
        assert await queue.take("b") is not None

    run(scenario, namespace_compiles=2)


def test_a_jobs_compile_has_its_whole_deadline_however_long_it_waited(run: Callable[..., None]) -> None:
    async def scenario(queue: Queue) -> None:
        await queue.put("a", Priority.BATCH)
        await queue.put("b")
        await asyncio.sleep(0.3)
        batch, person = await queue.take("a"), await queue.take("b")
        assert batch is not None and batch.waited < 0.1
        assert person is not None and person.waited >= 0.3

    run(scenario)


def test_what_a_job_has_queued_and_does_not_wait_for_is_not_wanted(run: Callable[..., None]) -> None:
    async def scenario(queue: Queue) -> None:
        await queue.put("a", Priority.BATCH)
        await queue.put("b")
        assert await queue.unwanted() == {"a": 0, "b": 0}
        await asyncio.sleep(0.4)
        assert (await queue.unwanted())["a"] < 0.1
        await asyncio.sleep(0.2)
        unwanted = await queue.unwanted()
        assert unwanted["a"] >= 0.2 and unwanted["b"] == 0
        assert await queue.put("a", Priority.DEVICES) == "wait"
        assert (await queue.unwanted())["a"] == 0

    run(scenario, abandon_seconds=0.3)
