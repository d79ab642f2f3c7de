"""Dispatchers share the slots of a Ray cluster in Redis: fairly, without taking one that is in use."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from service_parts import RedisServer
from torchrelay.compiler.errors import Unavailable
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from torchrelay.workers.scheduling.own_slots import OwnSlots
from torchrelay.workers.scheduling.ray_cluster import RayNode
from torchrelay.workers.scheduling.slots import Slot, SlotPlace

GROUP = "a cluster|cpu||"


class Dispatcher:
    """What a pool does with claims, without the actors. `busy`: slots with a job, which it keeps for now."""

    def __init__(self, site: Site) -> None:
        self.claims = SlotClaims(site.keys, site.scripts, site.settings)
        self.site = site
        self.may_use: set[str] = set()
        self.held: list[str] = []
        self.busy: set[str] = set()

    async def round(self) -> None:
        held = sorted(self.held, key=lambda slot: slot not in self.busy)
        self.may_use = set(await self.claims.claim(GROUP, self.site.offered, held))
        self.held = [slot for slot in held if slot in self.may_use | self.busy]
        self.held += [slot for slot in self.site.offered if slot in self.may_use and slot not in self.held]


class Site:
    def __init__(self, redis_server: RedisServer, slots: int) -> None:
        self.settings = ServiceSettings(redis_url=redis_server.url, redis_timeout_seconds=0.5)
        self.redis = connect(self.settings)
        self.keys = Keys(self.settings.redis_prefix)
        self.scripts = Scripts(self.redis)
        self.offered = [f"slot{number}" for number in range(slots)]

    async def rounds(self, *dispatchers: Dispatcher, count: int = 4) -> None:
        for _ in range(count):
            for each in dispatchers:
                await each.round()

    async def expire(self, dispatcher: Dispatcher) -> None:
        """As if it had not claimed for longer than its lease."""
        _, members, _ = self.keys.slot_keys(GROUP)
        await self.redis.zadd(members, {dispatcher.claims.dispatcher: 1})


Scenario = Callable[[Site], Awaitable[None]]


@pytest.fixture
def run(redis_server: RedisServer) -> Callable[..., None]:
    def run(scenario: Callable[..., Awaitable[Any]], slots: int = 4) -> None:
        async def within() -> None:
            site = Site(redis_server, slots)
            try:
                await scenario(site)
            finally:
                await site.redis.aclose()

        asyncio.run(within())

    return run


@pytest.mark.parametrize(("slots", "members"), [(4, 1), (4, 2), (4, 3), (1, 3), (7, 3), (2, 5)])
def test_shares_differ_by_one_slot_at_most_and_no_slot_is_left(run, slots: int, members: int) -> None:
    async def scenario(site: Site) -> None:
        dispatchers: list[Dispatcher] = []
        for _ in range(members):
            dispatchers.append(Dispatcher(site))
            before = [set(each.held) for each in dispatchers]
            await site.rounds(*dispatchers)
            assert all(
                set(each.held) <= held or not held for each, held in zip(dispatchers, before, strict=True)
            ), "who has slots gets no others in their place"
        counts = sorted(len(each.held) for each in dispatchers)
        assert sum(counts) == slots and counts[-1] - counts[0] <= 1
        assert sorted(slot for each in dispatchers for slot in each.held) == sorted(site.offered)

    run(scenario, slots)


def test_a_slot_in_use_is_nobody_elses_until_it_is_not_listed(run) -> None:
    async def scenario(site: Site) -> None:
        first, second = Dispatcher(site), Dispatcher(site)
        await first.round()
        first.busy = set(site.offered)
        await site.rounds(second, first)
        assert (len(first.may_use), len(first.held), second.held) == (2, 4, [])
        first.busy = set(first.held[:3])
        await site.rounds(first, second)
        assert (len(first.held), len(second.held)) == (3, 1)
        assert set(first.held) == first.busy, "of those in use, none has moved"

    run(scenario)


def test_slots_of_a_dispatcher_that_is_silent_for_too_long_go_to_the_others(run) -> None:
    async def scenario(site: Site) -> None:
        first, second = Dispatcher(site), Dispatcher(site)
        await site.rounds(first, second)
        await site.expire(second)
        await first.round()
        assert sorted(first.held) == sorted(site.offered)
        taken = set(second.held)
        await second.round()
        assert second.held == [] and taken, "when it comes back, what it had is another's"
        await site.rounds(first, second)
        assert len(second.held) == 2

    run(scenario)


def test_a_lease_is_written_again_when_a_quarter_of_it_has_passed_or_a_slot_changes(run) -> None:
    async def scenario(site: Site) -> None:
        # so long that no pause of this test counts
        site.settings = site.settings.model_copy(update={"lease_seconds": 1000})
        first = Dispatcher(site)
        await first.round()
        slots, members, _ = site.keys.slot_keys(GROUP)

        async def left_ms() -> float:
            seconds, micros = await site.redis.time()
            until = await site.redis.zscore(members, first.claims.dispatcher)
            return float(until) - (seconds * 1000 + micros // 1000)

        async def shorten(milliseconds: int) -> float:
            """As if so much of the lease had passed; what is left, in ms, with the time that this took."""
            for key in (slots, members):
                await site.redis.pexpire(key, 1_000_000 - milliseconds)
            await site.redis.zincrby(members, -milliseconds, first.claims.dispatcher)
            return await left_ms()

        before = await shorten(100_000)
        await first.round()
        assert await left_ms() <= before, "most of it is left"
        site.offered = site.offered[:2]
        await first.round()
        assert await left_ms() <= before, "nothing was taken"
        site.offered = [*site.offered, "a new one"]
        await first.round()
        assert "a new one" in first.held and await left_ms() > before
        before = await shorten(260_000)
        await first.round()
        assert await left_ms() > before
        assert min(await site.redis.pttl(slots), await site.redis.pttl(members)) > 740_000

    run(scenario)


def test_each_gets_some_of_every_model_and_whole_gpus(run) -> None:
    nodes = [
        RayNode(f"{model}{number}", "host", cpu_slots=0, gpus=2, resources={f"accelerator_type:{model}": 1.0})
        for model in ("H100", "A100")
        for number in range(2)
    ]
    offered = {SlotPlace(node.id, "cuda", index): node for node in nodes for index in range(6)}

    async def scenario(site: Site) -> None:
        pools = [OwnSlots(SlotClaims(site.keys, site.scripts, site.settings), "a cluster") for _ in range(2)]
        own: list[set[SlotPlace]] = [set(), set()]
        for _ in range(3):
            for number, pool in enumerate(pools):
                slots = {place: Slot(offered[place], place) for place in own[number]}
                own[number] = await pool.choose(offered, slots, {}) or set()
        assert own[0] | own[1] == set(offered) and not own[0] & own[1]
        for each in own:
            gpus = [(place.node, place.number % 2) for place in each]
            assert set(Counter(gpus).values()) == {3}, "three slots share a GPU"
            assert Counter(node[:4] for node, _ in set(gpus)) == {"H100": 2, "A100": 2}

    run(scenario)


def test_one_that_leaves_makes_room_at_once(run) -> None:
    async def scenario(site: Site) -> None:
        first, second = Dispatcher(site), Dispatcher(site)
        await site.rounds(first, second)
        await second.claims.release()
        await first.round()
        assert len(first.held) == 4
        await first.claims.release()
        assert await site.redis.keys("*slots:*") == []

    run(scenario)


def test_a_redis_that_forgot_everything_learns_who_uses_what_before_it_gives_any_slot(run) -> None:
    async def scenario(site: Site) -> None:
        first, second, third = (Dispatcher(site) for _ in range(3))
        await site.rounds(first, second)
        before = [set(first.held), set(second.held)]
        await site.redis.flushall()
        await site.rounds(first, third)
        assert set(first.held) == before[0] and third.held == [], "the second has not said what it uses"
        await second.round()
        assert second.held and set(second.held) <= before[1], "one that it may leave to the third"
        *_, closed = site.keys.slot_keys(GROUP)
        assert 0 < await site.redis.pttl(closed) <= 10_000
        await site.redis.delete(closed)
        await site.rounds(first, second, third)
        assert sorted(len(each.held) for each in (first, second, third)) == [1, 1, 2]

    run(scenario)


def test_a_redis_that_is_down_is_said(run, redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        first = Dispatcher(site)
        await first.round()
        redis_server.stop()
        with pytest.raises(Unavailable, match="Redis does not answer"):
            await first.round()
        await first.claims.release()

    run(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_two_use_one_slot_and_shares_become_fair(run, seed: int) -> None:
    """Dispatchers come, leave, die, fall silent; nodes come and go; jobs begin and end; Redis loses its memory."""
    chance = random.Random(seed)

    async def scenario(site: Site) -> None:
        live: list[Dispatcher] = []
        for step in range(150):
            match chance.choices(["join", "leave", "die", "nodes", "forget", "round"], [2, 1, 1, 1, 0.2, 20])[
                0
            ]:
                case "join" if len(live) < 6:
                    live.append(Dispatcher(site))
                case "leave" if live:
                    await live.pop(chance.randrange(len(live))).claims.release()
                case "die" if live:
                    await site.expire(live.pop(chance.randrange(len(live))))
                case "nodes":
                    site.offered = [f"slot{number}" for number in range(chance.randrange(9))]
                case "forget":
                    await site.redis.flushall()
                    for each in live:  # all call within the lease
                        await each.round()
            for each in chance.sample(live, len(live)):
                each.busy = {slot for slot in each.held if chance.random() < 0.3}
                await each.round()
                used = [slot for one in live for slot in one.held]
                assert len(used) == len(set(used)), step
        for each in live:
            each.busy = set()
        await site.redis.delete(site.keys.slot_keys(GROUP)[2])
        await site.rounds(*live, count=8)
        counts = [len(each.held) for each in live]
        if live:
            assert sum(counts) == len(site.offered) and max(counts) - min(counts) <= 1

    run(scenario)
