"""Fixtures of the security tests: the service's own parts, from tests/service, and gateways that are watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# First on the path: `conftest` is that of tests/service, whatever folders run beside.
sys.path.insert(0, str(Path(__file__).parent.parent / "service"))

from conftest import gateway, http, redis_server, settings, shared_redis, start_gateway
from watched import WatchedGateway

__all__ = [
    "gateway",
    "http",
    "redis_server",
    "settings",
    "shared_redis",
    "start_gateway",
    "watch_gateway",
]


@pytest.fixture
def watch_gateway(settings: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., WatchedGateway]]:
    """Start a gateway in a process of its own, all of whose Python processes have an audit hook."""
    started: list[WatchedGateway] = []

    def start(**changes: Any) -> WatchedGateway:
        watched = WatchedGateway({**settings, **changes}, tmp_path / f"watched-{len(started)}")
        started.append(watched)
        return watched

    yield start
    for watched in started:
        watched.kill()
