"""One compile for a key, whatever happens to its holder, to other gateways or to Redis."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx2
import msgspec
import pytest
from service_parts import (
    NEEDS,
    ArtifactPool,
    GatewayProcess,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    compiled,
    follow,
    graph,
    post,
    queue_and_take,
)
from torchrelay.compiler.request import codec
from torchrelay.compiler.request.schema import Const, Constant, Node
from torchrelay.service.access.audit import AuditEvent
from torchrelay.service.admission.compile_request import CompileRequest
from torchrelay.service.admission.saved_requests import SavedRequests
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.service.compile.compile_queue import CompileQueue, QueuedRequests
from torchrelay.service.compile.single_flight import Lease, Leases
from torchrelay.service.storage.redis.connections import connect
from torchrelay.service.storage.redis.keys import Keys
from torchrelay.service.storage.redis.scripts import Scripts
from waiting import until, wait_until

KEY = "e" * 64


def with_constant(body: bytes, *, bytes_: int) -> bytes:
    """The same request with a constant of so many random bytes, which do not compress."""
    request = codec.unpack_request(body)
    request.graph.nodes.insert(-1, Node("get_attr", "", [Const(0)]))
    constant = Constant("uint8", [bytes_], "cpu", os.urandom(bytes_))
    return codec.pack_request(msgspec.structs.replace(request, constants=[constant]))


def test_another_gateway_takes_over_when_the_holder_is_killed(
    start_gateway: StartGateway, start_process: Callable[[float], GatewayProcess]
) -> None:
    holder, pool = start_process(60), busy_pool()
    other = start_gateway(pool)
    with holder.http() as first, other.http() as second:
        name = post(first, graph()).json()["key"]
        stream = follow(second, name)
        assert next(stream)[1] == "queued"
        assert next(stream)[1] == "aot"
        pool.idle = 1
        holder.kill()
        rest = [(stage, data.get("detail", "")) for _, stage, data in stream]
        assert rest[0] == ("queued", "taken over from a holder that died")
        assert rest[-1][0] == "done"
        assert other.pool.calls == [name]
        assert second.get(f"/v1/artifacts/{name}").status_code == 200


def test_who_takes_over_has_what_is_left_of_the_deadline(
    start_gateway: StartGateway, start_process: Callable[[float], GatewayProcess]
) -> None:
    class Second(ArtifactPool):
        left: ClassVar[list[float]] = []

        async def compile(self, request_bytes: bytes, *, deadline_seconds: float, **rest: Any) -> bytes:
            self.left.append(deadline_seconds)
            return await super().compile(request_bytes, deadline_seconds=deadline_seconds, **rest)

    holder, pool = start_process(60), Second()
    pool.idle = 0
    other = start_gateway(pool, compile_deadline_seconds=100)
    with holder.http() as first, other.http() as second:
        name = post(first, graph()).json()["key"]
        began = time.monotonic()
        stream = follow(second, name)
        assert [next(stream)[1] for _ in range(2)] == ["queued", "aot"]
        time.sleep(2)
        used = time.monotonic() - began
        holder.kill()
        pool.idle = 1
        assert [stage for _, stage, _ in stream][-1] == "done"
        assert len(pool.left) == 1 and pool.left[0] <= 100 - used + 0.1


def test_a_compile_that_waits_for_a_worker_soon_counts_as_overdue(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.compile.intake.OVERDUE_SECONDS", 0.5)
    pool = busy_pool()
    with start_gateway(pool).http() as http:
        post(http, graph())
        wait_until(lambda: pool.overdue == {"cpu": 1}, seconds=60)
        pool.idle = 1
        wait_until(lambda: not any(pool.overdue.values()), seconds=60)


def test_a_restarted_gateway_goes_on_with_what_its_clients_wait_for(
    start_gateway: StartGateway, start_process: Callable[[float], GatewayProcess]
) -> None:
    killed = start_process(60)
    with killed.http() as http:
        name = post(http, graph()).json()["key"]
        stream = follow(http, name)
        seen = next(stream)[0]
        killed.kill()
    with start_gateway().http() as http:
        stages = [stage for _, stage, _ in follow(http, name, after=seen)]
        assert stages[-3:] == ["inductor", "publish", "done"]
        assert post(http, graph()).status_code == 200


def test_a_gateway_that_stops_hands_its_compiles_over_at_once(start_gateway: StartGateway) -> None:
    holder, pool = start_gateway(ArtifactPool(seconds=60), lease_seconds=30), busy_pool()
    other = start_gateway(pool, lease_seconds=30)
    with holder.http() as first, other.http() as second:
        name = post(first, graph()).json()["key"]
        stream = follow(second, name)
        assert [next(stream)[1] for _ in range(2)] == ["queued", "aot"]
        pool.idle = 1
        began = time.monotonic()
        holder.stop()
        assert [stage for _, stage, _ in stream][-1] == "done"
        assert time.monotonic() - began < 10
    assert holder.pool.cancelled == [name]


def test_a_stream_can_be_resumed_at_another_gateway(start_gateway: StartGateway) -> None:
    one, two = start_gateway(ArtifactPool(seconds=1), lease_seconds=30), start_gateway(lease_seconds=30)
    with one.http() as first, two.http() as second:
        name = post(first, graph()).json()["key"]
        stream = follow(first, name)
        seen, _, _ = next(stream)
        stream.close()
        stages = [stage for _, stage, _ in follow(second, name, after=seen)]
        assert stages == ["aot", "inductor", "publish", "done"]


def test_a_late_publish_under_an_old_fence_is_refused(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        configured = ServiceSettings(**settings)
        redis = connect(configured)
        keys, scripts = Keys(configured.redis_prefix), Scripts(redis)
        leases = Leases(keys, scripts, configured)
        name = "ab" * 32
        old = await queue_and_take(leases, name, b"body", NEEDS)
        assert isinstance(old, Lease)
        assert await queue_and_take(leases, name, b"body", NEEDS) == "wait"
        await redis.delete(keys.lease(name))  # as when it expires
        new = await leases.take(name, NEEDS)
        assert new is not None
        assert int(new.fence) > int(old.fence)
        assert new.body == b"body"

        publish = [*keys.entry_keys(name), *keys.compile_keys(name)]

        async def offer(token: str, digest: str) -> list[bytes]:
            entry = [token, digest, 10, "store", "default", "1.0", 1000, keys.wake, 0, 0, 0]
            event = AuditEvent(action="published", key=name, digest=digest)
            blob = keys.blob(digest)
            return await scripts.publish(keys=publish, args=[name, 100, blob, *entry, *event.fields()])

        assert await offer(old.token, "old") == [b"refused"]
        assert await leases.progress(old, "inductor", "") is False
        assert (await leases.renew(old))[0] == "lost"
        await redis.delete(keys.lease(name))
        renewal, again = await leases.renew(new)
        assert renewal == "retaken"
        assert int(again.fence) > int(new.fence)
        assert await offer(new.token, "stale") == [b"refused"]
        assert await offer(again.token, "new") == [b"published", b"new"]
        assert await offer(again.token, "new") == [b"published", b"new"]
        assert await offer(old.token, "old") == [b"exists", b"new"]
        await redis.aclose()

    asyncio.run(scenario())


def test_a_takeover_whose_answer_was_lost_has_the_body_the_second_time(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        configured = ServiceSettings(**settings)
        redis, keys = connect(configured), Keys(configured.redis_prefix)
        leases = Leases(keys, Scripts(redis), configured)
        await queue_and_take(leases, "ab" * 32, b"body", NEEDS)
        await redis.delete(keys.lease("ab" * 32))  # as when it expires
        answers = [await leases.acquire("ab" * 32, "me", b"", needs=NEEDS, mode="take") for _ in range(2)]
        assert answers[0][:3] == answers[1][:3]
        assert answers[0][2] == b"body"
        await redis.aclose()

    asyncio.run(scenario())


def test_a_compile_whose_dispatchers_die_again_and_again_is_given_up(
    settings: dict[str, Any], start_gateway: StartGateway
) -> None:
    pool = busy_pool()
    gateway = start_gateway(pool)

    async def take_and_die(key: str) -> None:
        configured = ServiceSettings(**settings)
        redis, keys = connect(configured), Keys(configured.redis_prefix)
        for _ in range(3):
            assert await Leases(keys, Scripts(redis), configured).take(key, NEEDS)
            await redis.delete(keys.lease(key))  # as when it expires
        await redis.aclose()

    with gateway.http() as http:
        key = post(http, graph()).json()["key"]
        asyncio.run(take_and_die(key))
        pool.idle = 1
        pool.changed()
        *_, (_, stage, data) = follow(http, key)
        assert (stage, data["error"]["code"]) == ("failed", "compile_killed")
        assert "3 dispatchers" in data["error"]["message"]
        assert post(http, graph()).status_code == 500  # remembered
        assert pool.calls == []


def test_a_body_goes_to_redis_once(start_gateway: StartGateway, redis_server: RedisServer) -> None:
    body = with_constant(graph(), bytes_=1 << 20)
    gateway = start_gateway(ArtifactPool(seconds=3), lease_seconds=1.0)
    with gateway.http() as http, redis_server.client() as redis:
        before = redis.info("stats")["total_net_input_bytes"]
        for _ in range(10):
            answer = post(http, body)
            assert answer.status_code == 202
        *_, (_, stage, _) = follow(http, answer.json()["key"])  # renewed about 8 times meanwhile
        assert stage == "done"
        received = redis.info("stats")["total_net_input_bytes"] - before
    assert 1 << 20 < received < 2 << 20


def test_a_lease_taken_again_of_an_empty_redis_brings_the_body_back(
    settings: dict[str, Any], redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        configured = ServiceSettings(**settings)
        redis = connect(configured)
        keys = Keys(configured.redis_prefix)
        leases = Leases(keys, Scripts(redis), configured)
        lease = await queue_and_take(leases, "ab" * 32, b"body", NEEDS)
        assert isinstance(lease, Lease)
        await redis.flushall()
        assert (await leases.renew(lease))[0] == "retaken"
        assert await redis.get(keys.request("ab" * 32)) == b"body"
        await redis.aclose()

    asyncio.run(scenario())


def test_fences_rise_although_redis_forgot_them(settings: dict[str, Any], redis_server: RedisServer) -> None:
    async def scenario() -> None:
        configured = ServiceSettings(**settings)
        redis = connect(configured)
        leases = Leases(Keys(configured.redis_prefix), Scripts(redis), configured)
        first = await queue_and_take(leases, "ab" * 32, b"body", NEEDS)
        await redis.flushall()
        second = await queue_and_take(leases, "ab" * 32, b"body", NEEDS)
        assert isinstance(first, Lease)
        assert isinstance(second, Lease)
        assert int(second.fence) > int(first.fence)
        await redis.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [0.5, 4.0], ids=["finished while Redis is away", "finished afterwards"])
def test_a_compile_survives_a_restart_of_redis(
    seconds: float, start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(ArtifactPool(seconds=seconds))
    with gateway.http() as http:
        name = post(http, graph()).json()["key"]
        stages: list[str] = []
        reader = threading.Thread(target=lambda: stages.extend(s for _, s, _ in follow(http, name)))
        reader.start()
        wait_until(lambda: stages)
        redis_server.stop()
        time.sleep(1.0)
        assert post(http, graph()).status_code == 503
        redis_server.start()  # empty: nothing was kept on disk
        reader.join(20)
        assert stages[-1] == "done"
        assert gateway.pool.calls == [name]
        assert post(http, graph()).status_code == 200


def test_a_compile_without_a_trace_is_given_up(
    start_gateway: StartGateway,
    start_process: Callable[[float], GatewayProcess],
    redis_server: RedisServer,
) -> None:
    holder, pool = start_process(60), busy_pool()
    other = start_gateway(pool)
    with holder.http() as first, other.http() as second:
        stream = follow(second, post(first, graph()).json()["key"])
        assert [next(stream)[1] for _ in range(2)] == ["queued", "aot"]
        holder.kill()
        pool.idle = 1
        redis_server.client().flushall()
        *_, (_, stage, data) = stream
        assert (stage, data["error"]["code"]) == ("failed", "unavailable")
        compiled(second, graph())


def test_requests_right_after_a_restart_of_redis_join_the_running_compile(
    start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    gateway = start_gateway(ArtifactPool(seconds=3), lease_seconds=6)
    with gateway.http() as http:
        post(http, graph())
        wait_until(lambda: bool(gateway.pool.calls), seconds=30)
        redis_server.client().flushall()
        compiled(http, graph())
    assert len(gateway.pool.calls) == 1


def test_redis_gone_is_a_typed_answer_and_it_heals_by_itself(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    redis_server.stop()
    answer = post(http, graph())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["Retry-After"]) > 0
    ready = http.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["parts"]["redis"] != "ok"
    assert ready.json()["parts"]["workers"] == "not known while Redis cannot be reached"
    assert http.get("/livez").status_code == 200
    assert http.get("/metrics").status_code == 200
    redis_server.start()
    wait_until(lambda: http.get("/readyz").status_code == 200, seconds=30)
    compiled(http, graph())


def test_posts_at_the_same_moment_start_one_compile(gateway: Running) -> None:
    gateway.pool.seconds = 0.5
    with ThreadPoolExecutor(8) as threads, gateway.http() as http:
        answers = list(threads.map(lambda _: post(http, graph()), range(8)))
        *_, (_, stage, _) = follow(http, answers[0].json()["key"])
    assert [answer.status_code for answer in answers] == [202] * 8
    assert sorted(answer.headers["X-Torchrelay-Cache"] for answer in answers) == ["coalesced"] * 7 + ["miss"]
    assert (stage, len(gateway.pool.calls)) == ("done", 1)


def test_of_those_who_ask_together_one_sends_redis_the_body(redis_server: RedisServer) -> None:
    """And it stays there: the copy for tuning jobs is made inside Redis."""
    body = os.urandom(200_000)
    client = redis_server.client()

    async def main() -> None:
        redis = connect(ServiceSettings(redis_url=redis_server.url))
        keys, scripts = Keys("torchrelay:"), Scripts(redis)
        leases = Leases(keys, scripts, ServiceSettings(redis_url=redis_server.url))
        gateways = [CompileQueue("default", leases, QueuedRequests()) for _ in range(2)]
        request = CompileRequest(KEY, b"", NEEDS.toolchain, NEEDS.target, {}, [])
        received = client.info("stats")["total_net_input_bytes"]
        answers = await asyncio.gather(*(gateways[n % 2].ask(request, body) for n in range(100)))
        assert sorted(answers) == ["queued", *["wait"] * 99]
        await SavedRequests(redis, keys, scripts).note(KEY, body)
        assert client.info("stats")["total_net_input_bytes"] - received < 2 * len(body)
        assert await SavedRequests(redis, keys, scripts).get(KEY) == body
        await redis.aclose()

    asyncio.run(main())


def test_requests_that_are_queued_have_a_limit_in_bytes_and_leave_it_when_they_end(
    start_gateway: StartGateway,
) -> None:
    pool = busy_pool()
    with start_gateway(pool, queued_bytes=3 << 20).http() as http:
        first, second = (with_constant(graph(size), bytes_=2 << 20) for size in (8, 9))
        key = post(http, first).json()["key"]
        refused = post(http, second)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "bytes" in refused.json()["error"]["message"] and refused.headers["retry-after"]
        assert post(http, graph(7)).status_code == 202
        pool.idle = 1
        assert [stage for _, stage, _ in follow(http, key)][-1] == "done"
        assert post(http, second).status_code == 202


@pytest.mark.parametrize("over", [False, True], ids=["it waits", "it is over"])
def test_a_compile_whose_queueing_lost_its_answer_is_audited_and_its_request_saved(
    start_gateway: StartGateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    gateway = start_gateway(ArtifactPool() if over else busy_pool())
    acquire = Leases.acquire

    async def twice(leases: Leases, key: str, *args: Any, **options: Any) -> list[bytes]:
        answer = await acquire(leases, key, *args, **options)
        if answer != [b"queued"]:
            return answer
        await until(lambda: not over or redis.exists(Keys("torchrelay:").index(key)))
        return await acquire(leases, key, *args, **options)  # as redis-py does

    monkeypatch.setattr(Leases, "acquire", twice)
    with gateway.http() as http, redis_server.client() as redis:
        key = post(http, graph()).json()["key"]
        entries = http.get("/v1/audit").json()["entries"]
        assert [each["key"] for each in entries if each["action"] == "compile"] == [key]
        assert redis.exists(Keys("torchrelay:").saved_request(key))
        assert http.get("/v1/stats").json()["misses"] == 1
