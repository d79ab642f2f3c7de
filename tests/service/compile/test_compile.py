"""POST /v1/compile and what follows: misses, hits, progress and its resumption."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import msgspec
import pytest
from request_parts import request_of
from service_parts import (
    TOKEN,
    ArtifactPool,
    RedisServer,
    Running,
    StartGateway,
    busy_pool,
    compiled,
    follow,
    graph,
    post,
)
from torchrelay.clients.gateway.compile_client import GatewayClient
from torchrelay.clients.settings import ClientSettings
from torchrelay.compiler.api import compiles
from torchrelay.compiler.artifact import container, manifest
from torchrelay.compiler.errors import CompileFailed, CompileKilled, CompileTimeout, NoWorker, RelayError
from torchrelay.compiler.request import codec, key, schema
from torchrelay.service.compile.single_flight import Leases


def test_a_miss_compiles_and_the_next_request_hits(gateway: Running, http: httpx2.Client) -> None:
    body = graph()
    first = post(http, body)
    assert first.status_code == 202
    status = compiles.CompileStatus(**{**first.json(), "history": []})
    assert status.key == first.headers["X-Torchrelay-Key"] == key.key_of(codec.unpack_request(body))
    assert [stage for _, stage, _ in follow(http, status.key)] == [
        "queued",
        "aot",
        "inductor",
        "publish",
        "done",
    ]
    second = post(http, body)
    assert second.status_code == 200
    assert second.headers["X-Torchrelay-Cache"] == "hit"
    assert second.headers["Content-Type"] == manifest.ARTIFACT_MEDIA_TYPE
    assert second.content == http.get(status.artifact).content
    assert len(gateway.pool.calls) == 1


def test_artifacts_are_signed_by_the_key_that_info_names(gateway: Running, http: httpx2.Client) -> None:
    data = compiled(http, graph())
    keyring = gateway.app.state.gateway.keyring
    opened = container.verify(data, keyring.trust("default"), key=gateway.pool.calls[0])
    assert len(opened.members["code.py"]) == 1000
    assert http.get("/v1/info").json()["key_ids"] == [keyring.current]
    assert {path.stat().st_mode & 0o777 for path in gateway.settings.keys_location.iterdir()} == {0o600}


def test_compiles_that_nothing_was_compared_of_are_counted_and_their_manifests_say_why(
    gateway: Running, http: httpx2.Client
) -> None:
    compiled(http, graph(1))
    assert http.get("/v1/stats").json()["unverified"] == 0
    gateway.pool.unverified = "inputs need 9 bytes, limit 8"
    data = compiled(http, graph(2))
    assert container.read_manifest(data).verification.reason == "inputs need 9 bytes, limit 8"
    stats = http.get("/v1/stats").json()
    assert (stats["compiles"], stats["unverified"]) == (2, 1)
    assert 'torchrelay_shared_unverified_total{namespace="default"} 1.0' in http.get("/metrics").text


def test_a_look_into_the_cache_starts_no_compile(gateway: Running, http: httpx2.Client) -> None:
    answer = post(http, graph(), wait="cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert gateway.pool.calls == []
    compiled(http, graph())
    assert post(http, graph(), wait="cache").status_code == 200


def test_a_stream_goes_on_after_the_last_event_seen(http: httpx2.Client) -> None:
    name = post(http, graph()).json()["key"]
    events = list(follow(http, name))
    assert list(follow(http, name, after=events[1][0])) == events[2:]
    seconds = [data["seconds"] for _, _, data in events]
    assert seconds == sorted(seconds)


def test_a_client_that_saw_the_end_is_told_it_again(gateway: Running, http: httpx2.Client) -> None:
    gateway.pool.errors = [CompileFailed("no")]
    for size, end in ((1, "failed"), (2, "done")):
        name = post(http, graph(size)).json()["key"]
        *_, last = follow(http, name)
        assert list(follow(http, name, after=last[0])) == [last]
        assert last[1] == end


def test_a_stream_that_is_silent_sends_comments(gateway: Running, http: httpx2.Client) -> None:
    gateway.pool.seconds = 1.5
    name = post(http, graph()).json()["key"]
    assert [stage for _, stage, _ in follow(http, name, comments=True)].count("comment") >= 2


def test_a_compile_that_always_has_news_is_not_taken_for_lost(start_gateway: StartGateway) -> None:
    pool = ArtifactPool(seconds=3.0)
    pool.talks = 150  # more often than anybody looks
    with start_gateway(pool, lease_seconds=0.5, keepalive_seconds=0.3).http() as http:
        stages = [stage for _, stage, _ in follow(http, post(http, graph()).json()["key"])]
    assert stages.count("autotune") > 100
    assert stages[-1] == "done"


def test_the_status_of_a_compile_lists_its_history(http: httpx2.Client) -> None:
    compiled(http, graph())
    name = post(http, graph()).headers["X-Torchrelay-Key"]
    status = http.get(f"/v1/compiles/{name}").json()
    assert status["stage"] == "done"
    assert status["history"][0]["stage"] == "queued"


def test_a_stream_of_an_artifact_without_history_is_done_at_once(
    gateway: Running, http: httpx2.Client, redis_server: RedisServer
) -> None:
    compiled(http, graph())
    name = gateway.pool.calls[0]
    redis_server.client().delete(f"torchrelay:events:{name}")
    assert [stage for _, stage, _ in follow(http, name)] == ["done"]
    assert http.get(f"/v1/compiles/{name}").json()["stage"] == "done"


def test_a_failed_compile_tells_its_error_and_is_remembered(gateway: Running, http: httpx2.Client) -> None:
    gateway.pool.errors = [CompileFailed("no lowering for frobnicate")]
    name = post(http, graph()).json()["key"]
    *_, (_, stage, data) = follow(http, name)
    assert stage == "failed"
    assert data["error"]["code"] == "compile_failed"
    assert data["error"]["message"] == "no lowering for frobnicate"
    again = post(http, graph())
    assert (again.status_code, again.json()["error"]["code"]) == (422, "compile_failed")
    assert len(gateway.pool.calls) == 1
    assert http.get(f"/v1/compiles/{name}").json()["error"]["code"] == "compile_failed"


def test_a_remembered_failure_is_forgotten_after_its_time(start_gateway: StartGateway) -> None:
    gateway = start_gateway(negative_ttl_seconds=0.2)
    gateway.pool.errors = [CompileFailed("once")]
    with gateway.http() as http:
        name = post(http, graph()).json()["key"]
        assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
        while post(http, graph()).status_code == 422:
            pass
        compiled(http, graph())


def test_a_failure_that_may_not_happen_again_is_not_remembered(gateway: Running, http: httpx2.Client) -> None:
    gateway.pool.errors = [NoWorker("no worker for cp311")]
    name = post(http, graph()).json()["key"]
    assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
    assert post(http, graph()).status_code == 202


def test_a_killed_worker_is_retried_once(gateway: Running, http: httpx2.Client) -> None:
    gateway.pool.errors = [CompileKilled("the node went away")]
    compiled(http, graph())
    assert len(gateway.pool.calls) == 2
    gateway.pool.errors = [CompileKilled("crashed"), CompileKilled("crashed again")]
    name = post(http, graph(9)).json()["key"]
    *_, (_, stage, data) = follow(http, name)
    assert (stage, data["error"]["code"]) == ("failed", "compile_killed")
    assert len(gateway.pool.calls) == 4


def test_a_request_that_comes_while_a_failed_compile_is_charged_starts_a_new_one(
    gateway: Running, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge, released, charged = Leases.charge, threading.Event(), []

    async def slow_charge(self: Leases, seconds: float) -> None:
        await asyncio.to_thread(released.wait, 15)
        charged.append(seconds)
        await charge(self, seconds)

    monkeypatch.setattr(Leases, "charge", slow_charge)
    gateway.pool.errors = [NoWorker("it has just gone")]
    gateway.pool.seconds = 0.01
    name = post(http, graph()).json()["key"]
    assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
    assert post(http, graph()).status_code == 202
    told = list(follow(http, name))
    assert (told[-1][1], charged) == ("done", [])
    released.set()
    assert not [data for _, _, data in told if "taken" in data["detail"]]
    assert len(gateway.pool.calls) == 2


@pytest.mark.parametrize(
    ("errors", "status", "code"),
    [
        ([CompileKilled("crashed"), CompileKilled("crashed again")], 500, "compile_killed"),
        ([CompileTimeout("too slow")], 504, "compile_timeout"),
    ],
)
def test_a_graph_that_kills_its_workers_or_is_never_ready_is_refused_for_longer_each_time(
    start_gateway: StartGateway, redis_server: RedisServer, errors: list[RelayError], status: int, code: str
) -> None:
    gateway = start_gateway(negative_ttl_seconds=100)
    with gateway.http() as http, redis_server.client() as redis:
        name = ""
        for times in range(4):
            gateway.pool.errors = list(errors)
            name = post(http, graph()).json()["key"]
            assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
            assert len(gateway.pool.calls) == len(errors) * (times + 1)
            refused = post(http, graph())
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            (failed,) = redis.scan_iter(f"torchrelay:failed:{name}*")
            left = redis.pttl(failed) / 1000
            assert 100 * 2**times - 30 < left <= 100 * 2**times
            redis.delete(failed)  # as if the time were over
        assert len(list(redis.scan_iter(f"torchrelay:kills:{name}*"))) == 1
        compiled(http, graph())
        assert not list(redis.scan_iter(f"torchrelay:kills:{name}*"))


def sized(example: int) -> bytes:
    """A graph with a symbolic size, of which this is the example. The key is the same for all examples."""
    node, ref = schema.Node, schema.Ref
    body = [
        node("placeholder", "", []),
        node("placeholder", "", []),
        node("call_function", "_operator.add", [ref(1), ref(1)]),
        node("output", "", [schema.TupleArg([ref(2)])]),
    ]
    inputs: list[schema.Input] = [
        schema.SymIntInput("s0"),
        schema.TensorInput(["s0"], [1], "float32", "cpu", requires_grad=False),
    ]
    symbols = [schema.Symbol(name="s0", hint=example, lower=2, upper=None)]
    return codec.pack_request(request_of(body, inputs, symbols=symbols))


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([CompileFailed("out of memory")], 422),
        ([CompileKilled("crashed"), CompileKilled("crashed again")], 500),
        ([CompileTimeout("too slow")], 504),
    ],
)
def test_a_failure_with_one_example_size_refuses_no_other(
    gateway: Running, http: httpx2.Client, errors: list[RelayError], status: int
) -> None:
    gateway.pool.errors = list(errors)
    name = post(http, sized(10**9)).json()["key"]
    assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
    assert post(http, sized(10**9)).status_code == status
    other = post(http, sized(16))
    assert (other.status_code, other.json()["key"]) == (202, name)
    assert [stage for _, stage, _ in follow(http, name)][-1] == "done"
    assert post(http, sized(10**9)).status_code == 200


def test_who_waited_for_a_compile_that_failed_with_another_example_size_asks_again(gateway: Running) -> None:
    gateway.pool.seconds, gateway.pool.errors = 1.0, [CompileFailed("out of memory")]
    name, body = key.key_of(codec.unpack_request(sized(16))), sized(16)
    settings = ClientSettings(url=gateway.url, token=TOKEN, cache_dir=Path("/nonexistent"))
    with gateway.http() as http, GatewayClient(settings) as mine:
        assert post(http, sized(10**9)).status_code == 202
        submitted = mine.submit(body, name, cache_only=False, deadline=60)
        assert submitted.coalesced
        assert container.read_manifest(submitted.result().data).key == name
    assert len(gateway.pool.calls) == 2


def test_a_failure_under_other_limits_is_not_remembered(start_gateway: StartGateway) -> None:
    """As after an operator has given compiles more time."""
    for seconds in (840, 1840):
        gateway = start_gateway(negative_ttl_seconds=100, compile_deadline_seconds=seconds)
        with gateway.http() as http:
            gateway.pool.errors = [CompileTimeout("too slow")]
            answer = post(http, graph())
            assert answer.status_code == 202
            assert [stage for _, stage, _ in follow(http, answer.json()["key"])][-1] == "failed"
            assert post(http, graph()).status_code == 504
        gateway.stop()  # or its dispatcher might take the next one


def test_what_never_reached_a_worker_is_not_remembered(start_gateway: StartGateway) -> None:
    class Full(ArtifactPool):
        async def compile(self, request_bytes: bytes, **rest: Any) -> bytes:
            if len(self.calls) > 0:
                return await super().compile(request_bytes, **rest)
            self.calls.append("")
            rest["on_progress"]("queued", "9 ahead of it")
            raise CompileTimeout("no worker was free")

    with start_gateway(Full()).http() as http:
        name = post(http, graph()).json()["key"]
        assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
        compiled(http, graph())


def test_an_error_in_telling_progress_does_not_take_the_artifacts_place(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(*_: Any) -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(Leases, "progress", break_down)
    pool = ArtifactPool(seconds=0.2)
    pool.talks = 200  # more than are kept for Redis
    with start_gateway(pool).http() as http:
        assert compiled(http, graph())


def test_both_attempts_share_one_deadline(start_gateway: StartGateway) -> None:
    class Slow(ArtifactPool):
        left: ClassVar[list[float]] = []

        async def compile(self, request_bytes: bytes, *, deadline_seconds: float, **rest: Any) -> bytes:
            self.left.append(deadline_seconds)
            await asyncio.sleep(0.5)
            raise CompileKilled("crashed")

    with start_gateway(Slow(), compile_deadline_seconds=100).http() as http:
        name = post(http, graph()).json()["key"]
        assert [stage for _, stage, _ in follow(http, name)][-1] == "failed"
    first, second = Slow.left
    assert first <= 100
    assert second <= first - 0.5


def test_a_damaged_artifact_of_a_worker_is_never_published(gateway: Running, http: httpx2.Client) -> None:
    gateway.pool.corrupt = True
    name = post(http, graph()).json()["key"]
    *_, (_, stage, data) = follow(http, name)
    assert (stage, data["error"]["code"]) == ("failed", "service")
    assert http.get(f"/v1/artifacts/{name}").status_code == 404


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_manifest_with_impossible_seconds_is_never_published(
    gateway: Running, http: httpx2.Client, seconds: float
) -> None:
    gateway.pool.stages = [("aot", seconds)]
    name = post(http, graph()).json()["key"]
    *_, (_, stage, data) = follow(http, name)
    assert (stage, data["error"]["code"]) == ("failed", "service")
    assert http.get(f"/v1/artifacts/{name}").status_code == 404
    gateway.pool.stages = [("aot", 1.0)]
    compiled(http, graph())


def test_a_bug_in_the_pool_becomes_a_typed_error_without_its_text(
    gateway: Running, http: httpx2.Client
) -> None:
    gateway.pool.errors = [ZeroDivisionError("secret path")]
    name = post(http, graph()).json()["key"]
    *_, (_, _, data) = follow(http, name)
    assert data["error"]["code"] == "service"
    assert "secret" not in data["error"]["message"]


def test_a_compile_that_runs_over_its_deadline_times_out(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.service.compile.flights.POOL_GRACE_SECONDS", 0.1)
    gateway = start_gateway(ArtifactPool(seconds=30), compile_deadline_seconds=0.2)
    with gateway.http() as http:
        *_, (_, _, data) = follow(http, post(http, graph()).json()["key"])
    assert data["error"]["code"] == "compile_timeout"
    assert len(gateway.pool.cancelled) == 1


def test_a_compile_for_a_job_is_stopped_once_nobody_waits_for_it(start_gateway: StartGateway) -> None:
    gateway = start_gateway(ArtifactPool(seconds=30), abandon_seconds=1)
    with gateway.http() as http:
        kept = post(http, graph(1)).json()["key"]
        left = gateway.queue_for_job(graph(2))
        waited = gateway.queue_for_job(graph(3))
        for index, _ in enumerate(follow(http, waited, comments=True)):  # longer than abandon_seconds
            if index == 6:  # asked here: when nobody follows it any more, it has one second
                assert http.get(f"/v1/compiles/{waited}").json()["stage"] == "aot"
                break
        assert gateway.pool.cancelled[:1] == [left]
        assert http.get(f"/v1/compiles/{left}").json()["stage"] == "failed"
        assert http.get(f"/v1/compiles/{kept}").json()["stage"] == "aot"


def test_a_compile_that_redis_loses_as_it_is_queued_is_queued_again(
    start_gateway: StartGateway, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = start_gateway(pool := busy_pool())
    queue = gateway.app.state.gateway.tenants.default.queue
    ask, answers = queue.ask, []

    async def failing_over(*arguments: Any, **options: Any) -> str:
        answers.append(await ask(*arguments, **options))
        if len(answers) == 1:
            with redis_server.client() as client:
                client.flushall()
        return answers[-1]

    monkeypatch.setattr(queue, "ask", failing_over)
    with gateway.http() as http:
        answer = post(http, graph())
        assert (answer.status_code, answers) == (202, ["queued", "queued"]), answer.text
        pool.idle = 1
        pool.changed()
        *_, (_, stage, _) = follow(http, answer.json()["key"])
        assert stage == "done"


def test_the_queue_is_bounded(start_gateway: StartGateway) -> None:
    gateway = start_gateway(ArtifactPool(seconds=30), max_queued=2, retry_after_seconds=7)
    with gateway.http() as http:
        assert [post(http, graph(size)).status_code for size in (1, 2, 1)] == [202, 202, 202]
        full = post(http, graph(3))
        assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
        assert full.headers["Retry-After"] == "7"


def test_large_requests_are_checked_in_a_child_process(gateway: Running, http: httpx2.Client) -> None:
    body = graph(nodes=30_000)
    assert len(codec.encode_request(codec.unpack_request(body))) > 1 << 20
    compiled(http, body)
    assert gateway.pool.calls == [key.key_of(codec.unpack_request(body))]
    refused = post(http, graph(nodes=30_000, target="os.system"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "forbidden_target")


def test_a_gateway_process_serves_a_whole_compile_without_torch(settings: dict[str, Any]) -> None:
    program = """
import sys
from service_parts import *
running = Running(ServiceSettings(**msgspec.json.decode(sys.argv[1])), ArtifactPool())
running.start()
with running.http() as http:
    compiled(http, graph()); compiled(http, graph())
    assert http.get("/v1/stats").json()["hits"] == 1
running.stop()
assert "torch" not in sys.modules and "ray" not in sys.modules
"""
    argument = msgspec.json.encode(settings).decode()
    subprocess.run(
        [sys.executable, "-c", program, argument],
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[1] / "parts",
    )
