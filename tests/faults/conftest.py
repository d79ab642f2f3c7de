"""Fixtures of the tests of faults: the service's own parts, from tests/service; each test has a Redis to break."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# First on the path: `conftest` is that of tests/service, whatever folders run beside.
sys.path.insert(0, str(Path(__file__).parent.parent / "service"))
sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]

from conftest import gateway, http, settings, start_gateway, start_process
from service_parts import RedisServer

__all__ = ["gateway", "http", "redis_server", "settings", "start_gateway", "start_process"]


@pytest.fixture
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(persistent=getattr(request.module, "PERSISTENT", False))
    server.start()
    yield server
    server.close()
