"""Fixtures of the service's tests: everything is real but the compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from service_parts import TOKEN, ArtifactPool, GatewayProcess, RedisServer, Running, StartGateway
from torchrelay.service.base.settings import ServiceSettings


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """The redis-server of this process, empty and as it was configured, whatever the last test did to it."""
    shared_redis.reset()
    return shared_redis


@pytest.fixture
def settings(redis_server: RedisServer, tmp_path: Path) -> dict[str, Any]:
    """Settings of every gateway of a test: they share Redis and the state folder."""
    return {
        "redis_url": redis_server.url,
        "state_dir": str(tmp_path / "state"),
        "token": TOKEN,
        "training": True,
        "lease_seconds": 1.0,
        "keepalive_seconds": 0.5,
        "log_level": "warning",
    }


@pytest.fixture
def start_gateway(settings: dict[str, Any]) -> Iterator[StartGateway]:
    started: list[Running] = []

    def start(pool: ArtifactPool | None = None, **changes: Any) -> Running:
        running = Running(ServiceSettings(**{**settings, **changes}), pool or ArtifactPool())
        running.start()
        started.append(running)
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def start_process(settings: dict[str, Any]) -> Iterator[Callable[[float], GatewayProcess]]:
    started: list[GatewayProcess] = []

    def start(seconds: float) -> GatewayProcess:
        process = GatewayProcess(settings, seconds)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def gateway(start_gateway: StartGateway) -> Running:
    return start_gateway()


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx2.Client]:
    with gateway.http() as client:
        yield client
