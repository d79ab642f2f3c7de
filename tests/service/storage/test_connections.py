"""service/storage/redis/fair_pool.py: each gets a connection when it is its turn, and none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from service_parts import NEEDS, RedisServer, queue_and_take
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.single_flight import Lease, Leases
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.fair_pool import FairConnectionPool, reserved_for_leases
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts


def pool(url: str, **options: Any) -> FairConnectionPool:
    return FairConnectionPool.from_url(
        url, **{"max_connections": 2, "for_leases": 1, "timeout": 60.0, **options}
    )


def test_who_has_just_had_one_waits_behind_who_asked_before(redis_server: RedisServer) -> None:
    async def main() -> list[str]:
        connections = pool(redis_server.url)
        order: list[str] = []

        async def asks(name: str) -> None:
            for _ in range(3):
                connection = await connections.get_connection()
                order.append(name)
                await asyncio.sleep(0)
                await connections.release(connection)

        await asyncio.gather(*map(asks, "abc"))
        await connections.aclose()
        return order

    assert "".join(asyncio.run(main())) == "abcabcabc"


def test_a_turn_is_not_lost_with_a_connection_that_cannot_be_made(redis_server: RedisServer) -> None:
    async def main() -> None:
        nowhere = pool("redis://127.0.0.1:1/0", timeout=0.2)
        for _ in range(3):
            with pytest.raises(RedisConnectionError, match="connecting"):
                await nowhere.get_connection()

    asyncio.run(main())


def test_who_waits_too_long_or_leaves_takes_no_turn_along(redis_server: RedisServer) -> None:
    async def main() -> None:
        connections = pool(redis_server.url, timeout=0.2)
        held = await connections.get_connection()
        with pytest.raises(RedisConnectionError, match="No connection available"):
            await connections.get_connection()
        leaving = asyncio.create_task(connections.get_connection())
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        for _ in range(2):
            await connections.release(held)
            held = await connections.get_connection()
        await connections.release(held)
        with pytest.raises(KeyError):  # redis-py's own answer
            await connections.release(held)
        await connections.get_connection()
        with pytest.raises(RedisConnectionError, match="No connection available"):
            await connections.get_connection()
        await connections.aclose()

    asyncio.run(main())


def test_a_lease_is_kept_although_requests_have_all_connections(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def main() -> None:
        configured = ServiceSettings(**{**settings, "redis_timeout_seconds": 0.2, "lease_seconds": 60.0})
        redis = connect(configured)
        leases = Leases(Keys(configured.redis_prefix), Scripts(redis), configured)
        granted = await queue_and_take(leases, "ab" * 32, b"body", NEEDS)
        assert isinstance(granted, Lease)
        held = []
        with pytest.raises(RedisConnectionError, match="No connection available"):
            while True:
                held.append(await redis.connection_pool.get_connection())
        for _ in range(100):
            renewal, granted = await leases.renew(granted)
            assert renewal == "held"
        for connection in held:
            await redis.connection_pool.release(connection)
        await redis.aclose()

    asyncio.run(main())


def test_connections_for_leases_come_in_turn_and_go_back(redis_server: RedisServer) -> None:
    async def main() -> None:
        connections = pool(redis_server.url, timeout=0.2)
        with reserved_for_leases():
            kept = await connections.get_connection()
            with pytest.raises(RedisConnectionError, match="No connection available"):
                await connections.get_connection()
        await connections.release(await connections.get_connection())
        await connections.release(kept)
        await connections.get_connection()
        with reserved_for_leases():
            await connections.get_connection()
        await connections.aclose()

    asyncio.run(main())


def test_scripts_that_are_called_together_share_connections_and_not_each_others_errors(
    redis_server: RedisServer,
) -> None:
    async def main() -> None:
        redis = connect(ServiceSettings(redis_url=redis_server.url))
        keys, scripts = Keys("torchrelay:"), Scripts(redis)
        await redis.set(keys.bucket("broken"), "x")
        await redis.hset(keys.tokens, mapping={"good": "{}", "broken": "{}"})

        async def ask(name: str) -> Any:
            arguments = [keys.tokens, keys.bucket(name), keys.namespaces]
            return await scripts.authenticate(
                keys=arguments, args=[name, 1e6, 10, "torchrelay:", "default", ""]
            )

        for _ in range(2):
            names = ["good"] * 250 + ["broken"] + ["good"] * 250
            answers = await asyncio.gather(*map(ask, names), return_exceptions=True)
            assert [isinstance(each, ResponseError) for each in answers] == [n == "broken" for n in names]
            assert answers[0] == [b"{}", 0]
            await redis.script_flush()  # as a Redis that was started again
        assert len(await redis.client_list()) <= 4
        await redis.aclose()

    asyncio.run(main())


def test_who_stops_waiting_for_a_script_takes_no_answer_of_the_others_along(
    redis_server: RedisServer,
) -> None:
    async def main() -> None:
        redis = connect(ServiceSettings(redis_url=redis_server.url))
        keys, scripts = Keys("torchrelay:"), Scripts(redis)
        arguments = [keys.tokens, keys.bucket("a"), keys.namespaces]
        records = [f'{{"n":{n}}}' for n in range(20)]
        calls = [
            asyncio.create_task(
                scripts.authenticate(keys=arguments, args=["a", 0, 10, "torchrelay:", "default", record])
            )
            for record in records
        ]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[1::2] == [[record.encode(), 0] for record in records[1::2]]
        await redis.aclose()

    asyncio.run(main())


def test_a_script_that_is_called_when_the_last_answers_came_is_sent(redis_server: RedisServer) -> None:
    async def main() -> None:
        redis = connect(ServiceSettings(redis_url=redis_server.url))
        keys, scripts = Keys("torchrelay:"), Scripts(redis)
        arguments = [keys.tokens, keys.bucket("a"), keys.namespaces]

        async def one_after_the_other() -> None:
            for _ in range(300):
                await scripts.authenticate(keys=arguments, args=["a", 0, 10, "torchrelay:", "default", "{}"])

        async with asyncio.timeout(60):
            await asyncio.gather(*(one_after_the_other() for _ in range(3)))
        await redis.aclose()

    asyncio.run(main())


def test_a_connection_that_was_reset_before_a_command_is_an_outage_under_uvloop(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    errors: list[str] = []

    async def resets(connection: Any) -> None:
        connection._writer.transport.abort()
        await connection.send_command("PING")

    async def main() -> None:
        with pytest.raises(RedisConnectionError):
            await pool(redis_server.url, redis_connect_func=resets).get_connection()
        client = connect(ServiceSettings(**settings), errors.append)
        await client.ping()
        (connection,) = client.connection_pool._available_connections
        connection._writer.transport.abort()  # as by Redis' end; uvloop raises RuntimeError upon a write
        await client.ping()
        await client.aclose()

    uvloop.run(main())
    assert errors == []


def test_a_cancellation_that_comes_during_a_call_ends_the_task_whatever_moment_it_comes_at(
    settings: dict[str, Any],
) -> None:
    async def scenario() -> None:
        redis = connect(ServiceSettings(**settings))
        await redis.ping()

        async def call() -> None:
            await redis.ping()
            await asyncio.Event().wait()

        for moment in range(40):  # in turns of the event loop
            task = asyncio.create_task(call())
            for _ in range(moment):
                await asyncio.sleep(0)
            task.cancel()
            _, left = await asyncio.wait({task}, timeout=5)
            assert not left, f"the cancellation after {moment} turns was lost"
        assert await redis.ping()
        await redis.aclose()

    asyncio.run(scenario())
