"""A gateway that is stopped while it holds a lease, and goes on after somebody else has published."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_parts import RedisProxy
from service_parts import GatewayProcess, RedisServer, StartGateway, busy_pool, follow, graph, post
from torchrelay.service.storage.redis.keys import Keys
from waiting import wait_until

StartProcess = Callable[..., GatewayProcess]


@pytest.fixture
def start_holder(settings: dict[str, Any]) -> Iterator[StartProcess]:
    started: list[GatewayProcess] = []

    def start(seconds: float, **changes: Any) -> GatewayProcess:
        started.append(GatewayProcess({**settings, "blob_inline_bytes": 0, **changes}, seconds))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def _digest(server: RedisServer, key: str) -> bytes | None:
    return server.client().hget(Keys("torchrelay:").index(key), "digest")


def test_the_publish_of_a_holder_that_was_stopped_on_its_way_is_refused(
    start_holder: StartProcess, start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    proxy = RedisProxy(redis_server.socket)
    proxy.start()
    proxy.holds_at = b"$5\r\nstore\r\n"  # where a blob lies: only the publication says it
    try:
        holder = start_holder(0.2, redis_url=proxy.url)
        other = start_gateway(busy_pool(), blob_inline_bytes=0)
        with other.http() as http:
            with holder.http() as first:
                key = post(first, graph()).json()["key"]
            assert proxy.held.wait(20)
            os.kill(holder.process.pid, signal.SIGSTOP)
            other.pool.idle = 1
            blobs = other.settings.state_dir / "blobs" / "artifacts"
            (late,) = (path for path in blobs.rglob("*") if path.is_file())
            assert _digest(redis_server, key) is None
            *_, (_, stage, _) = follow(http, key)  # the lease runs out, and this gateway takes over
            assert stage == "done"
            assert other.pool.calls == [key]
            published = http.get(f"/v1/artifacts/{key}").content
            digest = _digest(redis_server, key)
            proxy.let_go()  # the publish under the old fence reaches Redis now
            os.kill(holder.process.pid, signal.SIGCONT)
            wait_until(lambda: not late.exists(), seconds=30)  # what it wrote, it deletes
            assert _digest(redis_server, key) == digest
            with holder.http() as first:
                assert post(first, graph()).content == published
            assert http.get(f"/v1/artifacts/{key}").content == published
            assert http.get("/v1/stats").json()["compiles"] == 1
            assert [path.name for path in blobs.rglob("*") if path.is_file()] == [digest.decode()]
    finally:
        proxy.let_go()
        proxy.stop()


def test_a_holder_stopped_in_the_middle_of_its_compile_changes_nothing_when_it_goes_on(
    start_holder: StartProcess, start_gateway: StartGateway, redis_server: RedisServer
) -> None:
    holder, other = start_holder(1.0), start_gateway(busy_pool(), blob_inline_bytes=0)
    with holder.http() as first, other.http() as http:
        key = post(first, graph()).json()["key"]
        stream = follow(http, key)
        assert [next(stream)[1] for _ in range(2)] == ["queued", "aot"]
        os.kill(holder.process.pid, signal.SIGSTOP)
        other.pool.idle = 1
        stages = [stage for _, stage, _ in stream if stage != "comment"]
        assert stages[-1] == "done"
        digest = _digest(redis_server, key)
        published = http.get(f"/v1/artifacts/{key}").content
        os.kill(holder.process.pid, signal.SIGCONT)
        assert post(first, graph()).content == published
        other.pool.idle = 0
        assert post(first, graph(2)).status_code == 202  # it is well
        *_, (_, stage, _) = follow(first, post(first, graph(2)).headers["X-Torchrelay-Key"])
        assert stage == "done"
        assert _digest(redis_server, key) == digest
        assert http.get(f"/v1/artifacts/{key}").content == published
        assert other.pool.calls == [key]
