"""The tuning database in a real Redis: what is kept, for whom, how much of it, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from service_parts import RedisServer
from torchrelay.compiler.errors import LimitExceeded
from torchrelay.compiler.tuning import queries, records
from torchrelay.compiler.tuning.records import Problem, TuningEntry
from torchrelay.service.compile.search.database import TuningDatabase
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from tuning_parts import PLACE, entry, problem

ELSEWHERE = msgspec.structs.replace(PLACE, driver="590")


@asynccontextmanager
async def database(
    server: RedisServer, namespace: str = "default", limit: int = 1000
) -> AsyncIterator[TuningDatabase]:
    redis: Any = Redis.from_url(server.url)
    try:
        yield TuningDatabase(redis, Keys("torchrelay:", namespace), Scripts(redis), limit=limit)
    finally:
        await redis.aclose()


Scenario = Callable[[TuningDatabase], Coroutine[None, None, None]]


def run(server: RedisServer, scenario: Scenario, **options: int) -> None:
    async def opened() -> None:
        async with database(server, **options) as tunings:  # type: ignore[arg-type]
            await scenario(tunings)

    asyncio.run(opened())


async def everything(tunings: TuningDatabase, count: int = 10) -> list[TuningEntry]:
    """All pages together."""
    entries, cursor = await tunings.page(0, count)
    while cursor:
        more, cursor = await tunings.page(cursor, count)
        entries += more
    return entries


def test_what_is_kept_is_known_for_its_problem_in_its_place_alone(redis_server: RedisServer) -> None:
    async def scenario(tunings: TuningDatabase) -> None:
        kept = await tunings.store([entry(2), entry(3)])
        assert [(each.entry, each.outcome) for each in kept] == [(entry(2), "new"), (entry(3), "new")]
        assert await tunings.known(PLACE, [problem(1), problem(2), problem(3)]) == [entry(2), entry(3)]
        assert await tunings.known(PLACE, []) == []
        assert await tunings.known(ELSEWHERE, [problem(2)]) == []

    run(redis_server, scenario)


def test_the_first_entry_stands_until_it_is_replaced_by_name(redis_server: RedisServer) -> None:
    async def scenario(tunings: TuningDatabase) -> None:
        await tunings.store([entry(2, "first")])
        (again,) = await tunings.store([entry(2, "second")])
        assert (again.entry, again.outcome) == (entry(2, "first"), "exists")
        assert await tunings.known(PLACE, [problem(2)]) == [entry(2, "first")]
        (replaced,) = await tunings.store([entry(2, "second")], replace=True)
        assert (replaced.entry, replaced.outcome) == (entry(2, "second"), "replaced")
        (same,) = await tunings.store([entry(2, "second")], replace=True)
        assert same.outcome == "exists"
        assert await tunings.known(PLACE, [problem(2)]) == [entry(2, "second")]

    run(redis_server, scenario)


def test_of_many_who_report_at_once_all_are_told_the_same_winner(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with database(redis_server) as one, database(redis_server) as other:
            told = await asyncio.gather(
                *((one, other)[i % 2].store([entry(2, f"candidate {i}")]) for i in range(40))
            )
        assert len({kept.entry for (kept,) in told}) == 1
        assert [kept.outcome for (kept,) in told].count("new") == 1

    asyncio.run(scenario())


def test_what_was_not_asked_for_the_longest_makes_room(redis_server: RedisServer) -> None:
    async def scenario(tunings: TuningDatabase) -> None:
        for size in range(1, 6):
            await tunings.store([entry(size)])
            await asyncio.sleep(0.005)
        await tunings.known(PLACE, [problem(1)])
        await asyncio.sleep(0.005)
        await tunings.store([entry(6), entry(7)])
        found = await tunings.known(PLACE, [problem(size) for size in range(1, 8)])
        assert found == [entry(size) for size in (1, 4, 5, 6, 7)]
        assert len(await everything(tunings)) == 5

    run(redis_server, scenario, limit=5)


def test_a_namespace_knows_nothing_of_anothers(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with database(redis_server, "red") as red, database(redis_server, "blue") as blue:
            await red.store([entry(2)])
            assert await blue.known(PLACE, [problem(2)]) == []
            assert await everything(blue) == []

    asyncio.run(scenario())


def test_all_entries_are_on_the_pages_however_many_there_are(redis_server: RedisServer) -> None:
    kept = {entry(size) for size in range(1, 751)}

    async def scenario(tunings: TuningDatabase) -> None:
        assert await everything(tunings) == []
        await tunings.store(sorted(kept, key=lambda each: each.problem.operands[0].size))
        first, cursor = await tunings.page(0, 50)
        assert cursor
        assert len(first) < 200
        assert set(await everything(tunings, 50)) == kept

    run(redis_server, scenario)


def test_an_entry_too_large_for_any_operator_is_refused_and_none_of_its_company_kept(
    redis_server: RedisServer,
) -> None:
    long = msgspec.structs.replace(
        entry(3), problem=Problem("mm", (), problem(3).result, (("x", "x" * 17_000),))
    )

    async def scenario(tunings: TuningDatabase) -> None:
        with pytest.raises(LimitExceeded, match=f"limit {queries.ENTRY_LIMIT}"):
            await tunings.store([entry(2), long])
        assert await everything(tunings) == []

    run(redis_server, scenario)


def test_what_cannot_be_read_is_unknown_and_the_next_search_writes_over_it(redis_server: RedisServer) -> None:
    async def scenario(tunings: TuningDatabase) -> None:
        await tunings.store([entry(2), entry(3)])
        with redis_server.client() as client:
            (name,) = client.keys("*tunings")
            field = f"{PLACE.digest()}:{records.problem_digest(problem(2))}"
            assert client.hexists(name, field)
            client.hset(name, field, b"\x93garbage")
            client.hset(
                name,
                f"{PLACE.digest()}:{records.problem_digest(problem(4))}",
                msgspec.msgpack.encode(entry(3)),
            )
        assert await tunings.known(PLACE, [problem(2), problem(3), problem(4)]) == [entry(3)]
        (kept,) = await tunings.store([entry(2, "again")])
        assert (kept.entry, kept.outcome) == (entry(2, "again"), "replaced")
        await tunings.store([entry(4)])
        assert await tunings.known(PLACE, [problem(2), problem(4)]) == [entry(2, "again"), entry(4)]

    run(redis_server, scenario)


def test_entries_outlive_a_restart_of_redis() -> None:
    server = RedisServer(persistent=True)

    async def keeping(tunings: TuningDatabase) -> None:
        await tunings.store([entry(2)])

    async def asking(tunings: TuningDatabase) -> None:
        assert await tunings.known(PLACE, [problem(2)]) == [entry(2)]

    try:
        server.start()
        run(server, keeping)
        server.stop()
        server.start()
        run(server, asking)
    finally:
        server.close()
