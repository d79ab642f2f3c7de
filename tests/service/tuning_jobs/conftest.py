"""A gateway whose workers search."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx2
import pytest
from service_parts import Running
from tune_parts import SearchingPool, with_workers


@pytest.fixture
def pool() -> SearchingPool:
    return SearchingPool()


@pytest.fixture
def gateway(start_gateway: Callable[..., Running], pool: SearchingPool) -> Running:
    return with_workers(start_gateway(pool))


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx2.Client]:
    with gateway.http() as client:
        yield client
