"""What an installation that does nothing costs Redis, in commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from service_parts import ArtifactPool, RedisServer
from torchrelay.compiler.api.admin import TokenRecord
from torchrelay.service.access import audit
from torchrelay.service.access.namespaces import Namespaces
from torchrelay.service.access.tokens import OWNER_ID, Grant
from torchrelay.service.base.counters import sum_counters
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.cache.use_counts import UseCounts
from torchrelay.service.compile.slot_claims import SlotClaims
from torchrelay.service.parts import background
from torchrelay.service.parts.dispatcher import DispatcherParts
from torchrelay.service.parts.shared import SharedParts
from torchrelay.service.storage.redis.counter_store import read_counters, read_sum
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts

KEYS = Keys("torchrelay:")
NAMESPACES = 200


@contextlib.asynccontextmanager
async def dispatcher_of(settings: dict[str, Any]) -> AsyncIterator[DispatcherParts]:
    """One that does nothing by itself."""
    shared = SharedParts(ServiceSettings(**settings))
    dispatcher = DispatcherParts(shared, ArtifactPool())  # type: ignore[arg-type]
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
        await shared.redis.aclose()
        shared.keyring.close()


async def calls(redis: Redis) -> dict[str, int]:
    """Of each command since the server's start."""
    found = await redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in found.items()}


def since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    own = {"info", "client", "hello", "client|setinfo"}  # of this test, and of a new connection
    counted = {name: number - before.get(name, 0) for name, number in after.items() if name not in own}
    return {name: number for name, number in counted.items() if number}


async def namespaces(redis: Redis) -> None:
    await redis.hset(KEYS.namespaces, mapping={f"team-{number}": "{}" for number in range(NAMESPACES)})


def test_a_dispatcher_without_jobs_asks_nothing_of_each_namespace(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def scenario() -> dict[str, int]:
        async with Redis.from_url(redis_server.url) as redis:
            await namespaces(redis)
            async with dispatcher_of(settings) as dispatcher:
                before = await calls(redis)
                await background.take_over_jobs(dispatcher)
                return since(before, await calls(redis))

    counted = asyncio.run(scenario())
    assert sum(counted.values()) < 5, counted


@pytest.mark.quick
def test_claims_that_do_not_change_write_no_slot(settings: dict[str, Any], redis_server: RedisServer) -> None:
    async def scenario() -> dict[str, int]:
        async with Redis.from_url(redis_server.url) as redis:
            claims = SlotClaims(KEYS, Scripts(redis), ServiceSettings(**settings))
            slots = [f"slot-{number}" for number in range(50)]
            held = sorted(await claims.claim("group", slots, []))
            assert held == sorted(slots)
            before = await calls(redis)
            assert sorted(await claims.claim("group", slots, held)) == held
            return since(before, await calls(redis))

    counted = asyncio.run(scenario())
    assert not counted.keys() & {"hset", "hdel"}
    assert sum(counted.values()) < 10, counted


def test_one_dispatcher_of_many_sweeps_and_looks_artifacts_up_together(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def scenario() -> tuple[dict[str, int], dict[str, int]]:
        async with Redis.from_url(redis_server.url) as redis, dispatcher_of(settings) as dispatcher:
            await dispatcher.shared.installation.look()
            folder = dispatcher.shared.settings.state_dir / "blobs" / "artifacts"
            for number in range(300):
                blob = folder / f"{number % 256:02x}" / f"{number % 256:02x}{number:062x}" / "digest"
                blob.parent.mkdir(parents=True)
                blob.write_bytes(b"unpublished")
                os.utime(blob, (1, 1))
            await redis.hset(KEYS.identity, "since", 0)
            async with dispatcher_of(settings) as other:
                before = await calls(redis)
                await background.sweep_tenants(dispatcher)
                first = await calls(redis)
                await background.sweep_tenants(other)
                return since(before, first), since(first, await calls(redis))

    swept, idle = asyncio.run(scenario())
    assert swept["zadd"] == 300  # each is marked
    assert idle == {"set": 1}


def test_a_sweep_that_fails_is_done_again(settings: dict[str, Any], redis_server: RedisServer) -> None:
    async def scenario() -> int:
        async with Redis.from_url(redis_server.url) as redis, dispatcher_of(settings) as dispatcher:
            await redis.set(KEYS.namespaces, "no hash")
            with pytest.raises(ResponseError):
                await background.sweep_tenants(dispatcher)
            await redis.delete(KEYS.namespaces)
            await background.sweep_tenants(dispatcher)
            return await redis.exists(KEYS.swept)

    assert asyncio.run(scenario()) == 1


def test_a_sweep_that_is_stopped_halfway_is_left_to_others(
    settings: dict[str, Any], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def endless(dispatcher: DispatcherParts) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def scenario() -> int:
        async with Redis.from_url(redis_server.url) as redis, dispatcher_of(settings) as dispatcher:
            monkeypatch.setattr(background, "sweep_all", endless)
            sweeping = asyncio.create_task(background.sweep_tenants(dispatcher))
            await begun.wait()
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            return await redis.exists(KEYS.swept)

    assert asyncio.run(scenario()) == 0


def test_one_gateway_reads_all_namespaces_for_the_metrics_of_all(redis_server: RedisServer) -> None:
    """The more there are the less often."""

    async def scenario() -> None:
        async with Redis.from_url(redis_server.url) as redis:
            await namespaces(redis)
            names = Namespaces(redis, KEYS, Scripts(redis)).names
            uses = UseCounts(KEYS, Scripts(redis))
            uses.count("team-7", {"requests": 1, "misses": 1, "fallback:no_worker": 2})
            await uses.write()
            summed = await read_sum(redis, KEYS, names)
            assert (summed.misses, summed.fallbacks) == (1, {"no_worker": 2})
            assert summed == sum_counters((await read_counters(redis, KEYS, await names())).values())
            assert 100 * NAMESPACES < await redis.pttl(KEYS.summed) < 600 * NAMESPACES
            before = await calls(redis)
            assert await read_sum(redis, KEYS, names) == summed
            assert since(before, await calls(redis)) == {"get": 1}

    asyncio.run(scenario())


def test_what_fits_is_not_looked_at_in_each_namespace(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    """An eviction that finds nothing to do, and one that finds something, read as much for 200 namespaces as for 1."""

    async def scenario() -> tuple[dict[str, int], dict[str, int]]:
        async with Redis.from_url(redis_server.url) as redis:
            await namespaces(redis)
            async with dispatcher_of({**settings, "cache_limit_bytes": 3000}) as dispatcher:
                tenant = await dispatcher.tenants.of("team-7")
                scripts, keys = dispatcher.shared.scripts, tenant.keys

                async def publish(number: int) -> None:
                    key, digest = f"{number:064x}", f"{number:064x}"
                    await scripts.publish(
                        keys=[*keys.entry_keys(key), *keys.compile_keys(key)],
                        args=[
                            *(key, 10, keys.blob(digest), "import", digest, 1000, "store", "team-7", "1.0"),
                            *(60_000, keys.wake, 0, 0, 0, "action", "x"),
                        ],
                    )

                await publish(1)
                await publish(2)
                assert await tenant.cache.trim() == 0  # it makes the sums of all namespaces
                await publish(3)
                before = await calls(redis)
                assert await tenant.cache.trim() == 0
                idle = since(before, await calls(redis))
                await publish(4)
                before = await calls(redis)
                assert await tenant.cache.trim() == 1
                return idle, since(before, await calls(redis))

    idle, evicting = asyncio.run(scenario())
    assert sum(idle.values()) < 10, idle
    assert sum(evicting.values()) < 40, evicting


def test_the_audit_logs_of_all_namespaces_together_are_bounded(redis_server: RedisServer) -> None:
    async def scenario() -> list[int]:
        async with Redis.from_url(redis_server.url) as redis:
            keys = [KEYS.of(name) for name in ("default", "red", "blue")]
            for each, length in zip(keys, (3000, 100, 2000), strict=True):
                async with redis.pipeline(transaction=False) as pipe:
                    for _ in range(length):
                        pipe.xadd(each.audit, {"action": "compile"})
                    await pipe.execute()
            await audit.trim(redis, keys, entries=2100)
            return [await redis.xlen(each.audit) for each in keys]

    longest, short, long = asyncio.run(scenario())
    assert short == 100
    assert 1000 <= longest < 1200 and 1000 <= long < 1200


def test_to_issue_a_token_reads_no_other(settings: dict[str, Any], redis_server: RedisServer) -> None:
    async def scenario() -> tuple[dict[str, int], int]:
        async with Redis.from_url(redis_server.url) as redis, dispatcher_of(settings) as dispatcher:
            tokens, by = dispatcher.shared.tokens, Grant("owner", frozenset(), OWNER_ID, everywhere=True)
            old = await tokens.issue("old", frozenset({"read"}), by=by, lifetime_seconds=-40 * 86400)
            for number in range(NAMESPACES):
                await tokens.issue(f"user-{number}", frozenset({"read"}), by=by, lifetime_seconds=60)
            before = await calls(redis)
            await tokens.issue("another", frozenset({"read"}), by=by)
            counted = since(before, await calls(redis))
            await tokens.forget_old()
            left = await tokens.records(by=by)
            assert old.record.id not in {record.id for record in left}
            return counted, len(left)

    counted, left = asyncio.run(scenario())
    assert not counted.keys() & {"hgetall", "hscan"}
    assert left == NAMESPACES + 1


def test_a_training_jobs_token_is_extended_and_revoked_without_reading_others(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def scenario() -> tuple[dict[str, int], list[TokenRecord]]:
        async with Redis.from_url(redis_server.url) as redis, dispatcher_of(settings) as dispatcher:
            tokens, by = dispatcher.shared.tokens, Grant("owner", frozenset(), OWNER_ID)
            for number in range(NAMESPACES):
                await tokens.issue(f"train job {number}", frozenset({"train"}), by=by, lifetime_seconds=60)
            before = await calls(redis)
            await tokens.extend("train job 7", namespace="default", lifetime_seconds=600)
            await tokens.revoke_named("train job 7", by=by)
            counted = since(before, await calls(redis))
            return counted, await tokens.records(by=by)

    counted, records = asyncio.run(scenario())
    assert not counted.keys() & {"hgetall", "hscan"}
    [revoked] = [each for each in records if each.revoked]
    assert revoked.name == "train job 7" and revoked.expires == max(each.expires or 0 for each in records)
    assert len(records) == NAMESPACES
