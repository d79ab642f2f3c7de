"""Redis fails over: the primary becomes a replica, and its name leads to another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from conftest import StartGateway
from service_parts import ArtifactPool, RedisServer, compiled, graph, post


@pytest.fixture
def successor() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


def test_a_gateway_finds_the_new_primary_without_a_restart(
    start_gateway: StartGateway, redis_server: RedisServer, successor: RedisServer, tmp_path: Path
) -> None:
    name = tmp_path / "redis.sock"
    name.symlink_to(redis_server.socket)
    gateway = start_gateway(ArtifactPool(), redis_url=f"unix://{name}")
    with gateway.http() as http, redis_server.client() as old, successor.client() as new:
        data = compiled(http, graph(1))
        for key in old.scan_iter():
            new.restore(key, 0, old.dump(key))
        old.replicaof("127.0.0.1", "1")  # it is read-only, and follows nobody
        name.unlink()
        name.symlink_to(successor.socket)
        answers: list[httpx2.Response] = [post(http, graph(1)) for _ in range(3)]
        assert [answer.content for answer in answers] == [data] * 3
        http.post("/v1/tokens", json={"name": "ada", "roles": ["read"]}).raise_for_status()
        compiled(http, graph(2))
        assert new.hget("torchrelay:stats", "compiles") == b"2"
