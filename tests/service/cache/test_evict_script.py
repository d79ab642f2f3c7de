"""What evict.lua takes, and that what a call of it does is bounded, in commands, however many namespaces there are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from service_parts import RedisServer
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.gateway.parts import GatewayParts
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts

KEYS = Keys("torchrelay:")
BATCH = 16
MOST_COMMANDS = 1000
"""For one call. Redis runs at least 250 of these in a millisecond."""


class Site:
    """Namespaces with entries, without a gateway."""

    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self.scripts = Scripts(redis)
        self._published = 0

    async def publish(self, namespace: str, size: int, used: int) -> str:
        """The new entry's key. used: ms, in place of the time at which it is published."""
        self._published += 1
        keys, key = KEYS.of(namespace), f"{self._published:064x}"
        await self.redis.hset(KEYS.namespaces, namespace, "{}")
        await self.scripts.publish(
            keys=[*keys.entry_keys(key), *keys.compile_keys(key)],
            args=[
                *(key, 10, keys.blob(key), "import", key, size, "store", namespace, "1.0"),
                *(60_000, keys.wake, 0, 0, 0, "action", "x"),
            ],
        )
        await self.redis.zadd(keys.lru, {key: used})
        return key

    async def pin(self, namespace: str, key: str, action: str = "pinned") -> None:
        await self.scripts.pin(keys=KEYS.of(namespace).entry_keys(key), args=[key, 10, action, "action", "x"])

    async def evict(self, limit: int, *, most: int = BATCH, asking: str = "default") -> tuple[int, list[str]]:
        """Whether to call again, and the keys that are gone."""
        more, *gone = await self.scripts.evict(
            keys=[KEYS.namespaces, *KEYS.sum_keys],
            args=[KEYS.installation, "default", "", limit, most, asking],
        )
        return more, [key.decode() for key in gone[1::4]]

    async def free(self, **options: Any) -> tuple[int, list[str]]:
        """Evict one entry, if that is enough."""
        return await self.evict(int(await self.redis.get(KEYS.bytes)) - 1, **options)

    async def commands(self) -> int:
        found = await self.redis.info("commandstats")
        return sum(int(stat["calls"]) for stat in found.values())


def on(server: RedisServer, scenario: Callable[[Site], Any]) -> Any:
    async def run() -> Any:
        async with Redis(unix_socket_path=str(server.socket)) as redis:
            return await scenario(Site(redis))

    return asyncio.run(run())


DICE = random.Random(1)
SIZES: dict[str, Callable[[], list[int]]] = {
    "one entry each": lambda: [1000],
    "one entry each of any size": lambda: [DICE.randrange(1000, 100_000)],
    "the same bytes": lambda: [1000, 1001, 1002],
    "any bytes": lambda: [DICE.randrange(1000, 100_000) for _ in range(3)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("most", [1, BATCH])
def test_what_an_eviction_costs_does_not_grow_with_the_namespaces(
    redis_server: RedisServer, sizes: Callable[[], list[int]], most: int
) -> None:
    async def cost(site: Site, namespaces: int) -> int:
        await site.redis.flushall()
        for number in range(namespaces):
            for used, size in enumerate(sizes(), start=number):
                await site.publish(f"team-{number}", size, used)
        before = await site.commands()
        more, gone = await site.evict(1, most=most, asking="team-1")
        assert (more, len(gone)) == (1, most)
        return await site.commands() - before

    async def costs(site: Site) -> tuple[int, int]:
        return await cost(site, 50), await cost(site, 500)

    few, many = on(redis_server, costs)
    assert many < 1.2 * few + 10
    assert many < MOST_COMMANDS


def test_namespaces_where_all_is_pinned_leave_the_loss_to_the_next(redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        for number in range(100):
            await site.pin(f"team-{number}", await site.publish(f"team-{number}", 1000, number))
        small = [await site.publish("small", 10, used) for used in (1000, 1001, 1002)]
        before = await site.commands()
        assert await site.free() == (0, small[:1])
        assert await site.commands() - before < MOST_COMMANDS
        assert await site.free() == (0, small[1:2])
        assert await site.redis.get(KEYS.bytes) == b"100010"  # what is pinned counts

    on(redis_server, scenario)


def test_what_is_unpinned_can_be_evicted_again(redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        large = await site.publish("large", 1000, 1)
        await site.pin("large", large)
        small = [await site.publish("small", 10, used) for used in (2, 3, 4)]
        assert await site.free() == (0, small[:1])
        await site.pin("large", large, "unpinned")
        assert await site.free() == (0, [large])

    on(redis_server, scenario)


def test_a_pinned_namespace_that_publishes_can_lose_that_again(redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        await site.pin("large", await site.publish("large", 1000, 1))
        small = [await site.publish("small", 10, used) for used in (2, 3, 5)]
        assert await site.free() == (0, small[:1])
        one, _ = [await site.publish("large", 1, used) for used in (4, 6)]
        assert await site.free() == (0, [one])

    on(redis_server, scenario)


def test_of_many_that_hold_the_same_each_loses_one_before_any_loses_two(redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        whose = {}
        for number in range(40):
            for used in (number, number + 100):
                whose[await site.publish(f"team-{number}", 1000, used)] = number
        gone, more = [], 1
        while more:
            more, some = await site.evict(40_000)
            gone += some
        assert sorted(whose[key] for key in gone) == list(range(40))

    on(redis_server, scenario)


def test_what_was_just_published_stays_and_a_later_publication_frees_it(redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        others = [await site.publish(f"team-{number}", 10, number) for number in range(30)]
        large = await site.publish("large", 1000, 100)
        more, gone = await site.free(asking="large")
        assert not more and len(gone) == 1 and gone[0] in others
        await site.publish("smallest", 1, 101)
        assert await site.free(asking="smallest") == (0, [large])

    on(redis_server, scenario)


def test_what_the_caller_published_last_stays(redis_server: RedisServer) -> None:
    async def scenario(site: Site) -> None:
        for number in range(30):
            await site.publish(f"team-{number}", 1000, number % 10)
        gone, more = [], 1
        while more:
            more, some = await site.evict(1, asking="team-7")
            gone += some
        assert len(set(gone)) == len(gone) == 29

    on(redis_server, scenario)


def test_a_trim_calls_until_all_fits(settings: dict[str, Any], redis_server: RedisServer) -> None:
    """More than one call evicts; an entry that the index has lost ends none of them early."""

    async def scenario(site: Site) -> tuple[int, int]:
        keys = KEYS.of("red")
        published = [await site.publish("red", 1000, used) for used in range(60)]
        await site.redis.delete(keys.index(published[3]))
        gateway = GatewayParts(ServiceSettings(**settings, cache_limit_bytes=10_000))
        try:
            tenant = await gateway.tenants.of("red")
            return await tenant.cache.trim(), await site.redis.zcard(keys.lru)
        finally:
            await gateway.redis.aclose()
            gateway.keyring.close()

    assert on(redis_server, scenario) == (49, 10)
